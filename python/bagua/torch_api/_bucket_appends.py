"""What may be appended to a bucket: the ``append_*`` methods of ``BaguaBucket``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import Self

from bagua import _C
from bagua.torch_api._bucket_ops import (
    AsynchronousOp,
    BucketOp,
    CentralizedOp,
    DecentralizedOp,
    LowPrecisionDecentralizedOp,
    LowRankOp,
    MomentumOp,
    SparseOp,
    check_asynchronous_mode,
)
from bagua.torch_api._error_state import new_memory
from bagua.torch_api._low_rank import low_rank_matrices, low_rank_memory
from bagua.torch_api._sparse_choice import number_sent
from bagua.torch_api.communication import BaguaProcessGroup
from bagua.torch_api.tensor import record_of

__all__ = ["AppendsOperations"]

#: Bagua's spelling of its codec.
_CODEC_ALIASES = {"MinMaxUInt8": "minmax_uint8"}


class AppendsOperations:
    """The operations of a bucket, in the order in which they run."""

    name: str
    flatten: bool
    tensors: list[torch.Tensor]
    backend_tensor: torch.Tensor
    ops: list[BucketOp]

    def view_of(self, index: int) -> torch.Tensor:
        """Where tensor ``index`` lies in the flat memory."""
        raise NotImplementedError

    def clear_ops(self) -> Self:
        """Remove all operations."""
        self.ops.clear()
        return self

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> Self:
        """Sum or mean of the bucket over all ranks.

        Args:
            hierarchical: exact inside a node, compressed between the nodes' leaders.
            average: mean instead of sum.
            scattergather: accumulate in f32 whatever the bucket's dtype.
            compression: a codec (``_C.codec_names()``) or Bagua's name ``"MinMaxUInt8"``.
            group: default the group of the wrapped module.

        Raises:
            ValueError: unknown codec.
        """
        codec = _CODEC_ALIASES.get(compression, compression) if compression else None
        if codec is None and scattergather:
            # The casts to the bucket's own dtype lose nothing and sum in f32 on the way.
            own = {torch.float16: "fp16", torch.bfloat16: "bf16"}
            codec = own.get(self.backend_tensor.dtype)
        if codec is not None:
            _C.make_codec(codec)  # an unknown name is reported here, with the known ones
        self.ops.append(CentralizedOp(hierarchical, average, codec, group))
        return self

    def append_decentralized_synchronous_op(
        self,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: BaguaProcessGroup | None = None,
    ) -> DecentralizedOp:
        """Mean of the bucket with other ranks; the bucket itself stays as it is.

        Args:
            peer_weight: receives the mean. Contiguous memory of its own, like ``backend_tensor``.
            hierarchical: mean inside a node, then ``peer_selection_mode`` between the leaders.
            peer_selection_mode: ``"all"``, or ``"shift_one"`` for one peer, another each time.
            group: default the group of the wrapped module.

        Returns:
            The op. After waiting, its ``copy_back_peer_weight(bucket)`` gives the bucket the mean.

        Raises:
            ValueError: unknown mode, or a ``peer_weight`` that does not fit.
        """
        flat = self.backend_tensor
        if (peer_weight.shape, peer_weight.dtype) != (flat.shape, flat.dtype):
            raise ValueError(
                f"bucket '{self.name}': peer_weight is {peer_weight.dtype} "
                f"{tuple(peer_weight.shape)}, the bucket is {flat.dtype} {tuple(flat.shape)}"
            )
        op = DecentralizedOp(peer_weight, hierarchical, peer_selection_mode, group)
        self.ops.append(op)
        return op

    def append_momentum_op(self, memories: Sequence[torch.Tensor], betas: torch.Tensor) -> Self:
        """Make momenta of the bucket's gradients, for the op appended next to average.

        Args:
            memories: the momenta so far, one per tensor, of its shape and dtype. They are only
                read: commit the averaged result yourself, once it is known to be finite. They are
                in unscaled units, the bucket is scaled as the gradients are (``GradScaler``).
            betas: f64 on CPU, one per tensor; may be written between two rounds.

        Raises:
            ValueError: the memories do not fit the tensors; names the first.
        """
        if len(memories) != len(self.tensors):
            raise ValueError(
                f"bucket '{self.name}': {len(memories)} memories for {len(self.tensors)} tensors"
            )
        views = [self.view_of(index) for index in range(len(self.tensors))]
        for tensor, view, memory in zip(self.tensors, views, memories, strict=True):
            if (memory.shape, memory.dtype) != (view.shape, view.dtype):
                raise ValueError(
                    f"bucket '{self.name}': the momentum of '{record_of(tensor).name}' is "
                    f"{memory.dtype} {tuple(memory.shape)}, its gradient is {view.dtype} "
                    f"{tuple(view.shape)}"
                )
        offsets = [int(view.storage_offset()) for view in views]
        strides = [list(view.stride()) for view in views]
        self.ops.append(MomentumOp(list(memories), offsets, strides, betas))
        return self

    def append_low_rank_op(
        self,
        rank: int,
        outcome: _C.RoundOutcome,
        hierarchical: bool = False,
        group: BaguaProcessGroup | None = None,
        *,
        min_compression_rate: float = 2.0,
        warm_start: bool = True,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> LowRankOp:
        """Mean of the bucket over all ranks, matrices in it as products of two thin ones.

        Args:
            rank: columns of the factors.
            outcome: one for all buckets whose memory changes together.
            hierarchical: exact inside a node, low rank between the nodes' leaders.
            group: default the group of the wrapped module.
            min_compression_rate: matrices that get smaller by less are averaged exactly.
            warm_start: start from the last round's factor instead of a random one.
            error_feedback: add to the next round what this one loses.
            seed: of the random factors, equal on all ranks.

        Returns:
            The op, which holds the memory.
        """
        flat = self.backend_tensor
        named = [(record_of(tensor).name, self.view_of(i)) for i, tensor in enumerate(self.tensors)]
        matrices = low_rank_matrices(named, rank, min_compression_rate)
        memory = low_rank_memory(flat, matrices, outcome, error_feedback=error_feedback)
        op = LowRankOp(
            flat.numel(), matrices, memory, hierarchical, warm_start, error_feedback, seed, group
        )
        self.ops.append(op)
        return op

    def append_sparse_op(
        self,
        ratio: float,
        outcome: _C.RoundOutcome,
        hierarchical: bool = False,
        group: BaguaProcessGroup | None = None,
        *,
        random_sparse: bool = False,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> SparseOp:
        """Mean of some elements of the bucket over all ranks; zeros elsewhere.

        Args:
            ratio: the part of the elements that is sent, at least one.
            outcome: one for all buckets whose memory changes together.
            hierarchical: exact inside a node, sparse between the nodes' leaders.
            group: default the group of the wrapped module.
            random_sparse: elements at random, instead of each rank's largest.
            error_feedback: add to the next round what this one does not send.
            seed: of ``random_sparse``, equal on all ranks.

        Returns:
            The op, which holds the memory.
        """
        flat = self.backend_tensor
        count = torch.zeros(1, dtype=torch.int64, device="cpu")
        memory = new_memory(flat, outcome, count, error_feedback=error_feedback)
        k = number_sent(flat.numel(), ratio)
        op = SparseOp(flat, k, memory, hierarchical, random_sparse, seed, group)
        self.ops.append(op)
        return op

    def append_asynchronous_model_average_op(
        self,
        peer_selection_mode: str,
        group: BaguaProcessGroup | None = None,
        *,
        sync_interval_ms: int = 500,
    ) -> AsynchronousOp:
        """Average the bucket, whose tensors are weights, in a thread of its own.

        All buckets of a module have this operation, and no other, or none has.

        Args:
            peer_selection_mode: ``"all"``.
            group: default the group of the wrapped module.
            sync_interval_ms: milliseconds between averages; the least of all buckets counts.

        Raises:
            ValueError: another mode.
        """
        check_asynchronous_mode(peer_selection_mode)
        op = AsynchronousOp(sync_interval_ms, group)
        self.ops.append(op)
        return op

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: torch.Tensor,
        left_peer_weight: torch.Tensor,
        right_peer_weight: torch.Tensor,
        hierarchical: bool = True,
        compression: str = "MinMaxUInt8",
        group: BaguaProcessGroup | None = None,
    ) -> LowPrecisionDecentralizedOp:
        """Mix the bucket, whose tensors are weights, with both neighbours' on a ring of the ranks.

        Args:
            weight: what the others believe this rank to hold. Like the two others f32, of one
                dimension, as long as ``backend_tensor`` and memory of its own. All three start as
                copies of weights that are equal on all ranks.
            left_peer_weight: the replica of the left neighbour's ``weight``.
            right_peer_weight: of the right neighbour's.
            hierarchical: exact mean inside a node, the ring between the nodes' leaders.
            compression: a codec (``_C.codec_names()``) or Bagua's name ``"MinMaxUInt8"``.
            group: default the group of the wrapped module.

        Returns:
            The op, which holds the replicas.

        Raises:
            ValueError: unknown codec, or a replica that does not fit.
        """
        codec = _CODEC_ALIASES.get(compression, compression)
        _C.make_codec(codec)
        op = LowPrecisionDecentralizedOp(
            weight, left_peer_weight, right_peer_weight, hierarchical, codec, group
        )
        flat = self.backend_tensor
        for name, replica in op.replicas().items():
            if (replica.shape, replica.dtype) != (flat.shape, torch.float32):
                raise ValueError(
                    f"bucket '{self.name}': the replica '{name}' is {replica.dtype} "
                    f"{tuple(replica.shape)}, it must be torch.float32 {tuple(flat.shape)}"
                )
        self.ops.append(op)
        return op
