"""What may be appended to a bucket: the ``append_*`` methods of ``BaguaBucket``."""

from __future__ import annotations

import torch
from typing_extensions import Self

from bagua import _C
from bagua.torch_api._bucket_ops import (
    AsynchronousOp,
    BucketOp,
    CentralizedOp,
    DecentralizedOp,
    check_asynchronous_mode,
)
from bagua.torch_api.communication import BaguaProcessGroup

__all__ = ["AppendsOperations"]

#: Bagua's spelling of its codec.
_CODEC_ALIASES = {"MinMaxUInt8": "minmax_uint8"}


class AppendsOperations:
    """The operations of a bucket, in the order in which they run."""

    name: str
    flatten: bool
    backend_tensor: torch.Tensor
    ops: list[BucketOp]

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
