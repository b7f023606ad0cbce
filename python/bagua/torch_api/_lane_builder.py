"""From the description of an operation to the C++ op, on the communicators of one lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bagua import _C
from bagua.torch_api import env
from bagua.torch_api._bucket_ops import (
    AsynchronousOp,
    BucketOp,
    CentralizedOp,
    CommHookOp,
    DecentralizedOp,
    LaneOp,
    LowPrecisionDecentralizedOp,
    LowRankOp,
    MomentumOp,
    PythonOp,
    RowsOp,
    SparseOp,
)
from bagua.torch_api._sparse_choice import sparse_mean
from bagua.torch_api._transport import Transport
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup

__all__ = ["LaneBuilder", "between_nodes_only", "comm_hook_op", "describe_op"]


@dataclass
class LaneBuilder:
    """The communicators of one lane, made on demand."""

    name: str
    device_type: str
    scratch: _C.Scratch = field(default_factory=_C.Scratch)
    communicators: dict[tuple[str, str], _C.CountingCommunicator] = field(default_factory=dict)

    def communicator(self, transport: Transport, purpose: str) -> _C.CountingCommunicator:
        key = (repr(transport.ranks), purpose)
        if key not in self.communicators:
            self.communicators[key] = transport.connect(f"{self.name}/{purpose}", self.device_type)
        return self.communicators[key]

    def of_nodes(
        self, transport: Transport
    ) -> tuple[_C.CountingCommunicator, _C.CountingCommunicator | None]:
        """Within this rank's node and, on its leader, between the nodes if there are several."""
        ranks = repr(transport.ranks)
        if (ranks, "node") not in self.communicators:
            node, leaders = transport.connect_nodes(self.name, self.device_type)
            self.communicators[ranks, "node"] = node
            if leaders is not None:
                self.communicators[ranks, "leaders"] = leaders
        return self.communicators[ranks, "node"], self.communicators.get((ranks, "leaders"))

    def op(self, spec: LaneOp, default: BaguaProcessGroup) -> _C.BucketOp:
        if isinstance(spec, PythonOp):
            return _C.PythonOp(spec.function)
        if isinstance(spec, MomentumOp):
            return _C.UpdateMomentum(
                spec.memories, spec.offsets, spec.strides, spec.betas, self.scratch
            )
        if isinstance(spec, DecentralizedOp):
            averaging = self._averaging(spec, default)
            return _C.AverageWeights(spec.peer_weight, spec.communications, averaging)
        if isinstance(spec, LowPrecisionDecentralizedOp):
            return self._mixing(spec, default)
        if isinstance(spec, LowRankOp):
            return self._mean(spec, default, lambda members: self._low_rank(spec, members))
        if isinstance(spec, SparseOp):
            return self._mean(spec, default, lambda members: self._sparse(spec, members))
        if isinstance(spec, AsynchronousOp):
            raise ValueError("asynchronous averaging cannot be mixed with other operations")
        reduce = _C.ReduceOp.AVG if spec.average else _C.ReduceOp.SUM
        if isinstance(spec, RowsOp):
            everyone = self.communicator((spec.group or default).transport, "all")
            return _C.AllReduceRows(everyone, self.scratch, spec.gradient, spec.sizes, reduce)
        return self._mean(spec, default, lambda m: self._flat_op(spec, m, reduce), reduce)

    def _mean(
        self,
        spec: CentralizedOp | LowRankOp | SparseOp,
        default: BaguaProcessGroup,
        make: Callable[[_C.CountingCommunicator], _C.BucketOp],
        reduce: _C.ReduceOp = _C.ReduceOp.AVG,
    ) -> _C.BucketOp:
        """The mean (or sum) over all ranks, by the op that ``make`` makes among its members."""
        transport = (spec.group or default).transport
        if not spec.hierarchical:
            return make(self.communicator(transport, "all"))
        return self._hierarchical(transport, transport.size, reduce, make)

    def _low_rank(self, spec: LowRankOp, members: _C.CountingCommunicator) -> _C.BucketOp:
        return _C.LowRank(
            members,
            self.scratch,
            spec.numel,
            list(spec.matrices.values()),
            warm_start=spec.warm_start,
            error_feedback=spec.error_feedback,
            seed=spec.seed,
            memory=spec.memory,
        )

    def _sparse(self, spec: SparseOp, members: _C.CountingCommunicator) -> _C.BucketOp:
        return sparse_mean(
            members,
            self.scratch,
            spec.flat,
            spec.k,
            spec.memory,
            random_sparse=spec.random_sparse,
            seed=spec.seed,
        )

    def _averaging(self, spec: DecentralizedOp, default: BaguaProcessGroup) -> _C.BucketOp:
        if spec.peer_selection_mode == "all":
            return self.op(CentralizedOp(spec.hierarchical, True, None, spec.group), default)
        return self._with_sizes(
            (spec.group or default).transport,
            spec.hierarchical,
            lambda members, sizes: _C.Gossip(members, spec.communications, sizes, self.scratch),
        )

    def _mixing(self, spec: LowPrecisionDecentralizedOp, default: BaguaProcessGroup) -> _C.BucketOp:
        def on_ring(members: _C.CountingCommunicator, sizes: list[int]) -> _C.BucketOp:
            left, right = mixing_weights(sizes, members.rank)
            codec = _C.make_codec(spec.codec, self.device_type)
            replicas = (spec.weight, spec.left_peer_weight, spec.right_peer_weight)
            return _C.CompressedGossip(
                members, codec, self.scratch, *replicas, left, right, checksum=env.get_checksum()
            )

        return self._with_sizes((spec.group or default).transport, spec.hierarchical, on_ring)

    def _with_sizes(
        self,
        transport: Transport,
        hierarchical: bool,
        make: Callable[[_C.CountingCommunicator, list[int]], _C.BucketOp],
    ) -> _C.BucketOp:
        """An op that weighs its members, ranks or nodes, by their numbers of ranks itself."""
        if not hierarchical:
            return make(self.communicator(transport, "all"), [1] * transport.size)
        nodes = transport.node_of_ranks()
        sizes = [nodes.count(nodes[leader]) for leader in _C.leaders(nodes)]
        # Not to weigh twice: to Hierarchical all nodes are as large as this one.
        ranks = nodes.count(nodes[transport.rank]) * len(sizes)
        return self._hierarchical(
            transport, ranks, _C.ReduceOp.AVG, lambda leaders: make(leaders, sizes)
        )

    def _hierarchical(
        self,
        transport: Transport,
        ranks: int,
        reduce: _C.ReduceOp,
        between_leaders: Callable[[_C.CountingCommunicator], _C.BucketOp],
    ) -> _C.BucketOp:
        node, leaders = self.of_nodes(transport)
        inner = None if leaders is None else between_leaders(leaders)
        nodes = len(_C.leaders(transport.node_of_ranks()))
        return _C.Hierarchical(node, inner, ranks, nodes, reduce)

    def _flat_op(
        self, spec: CentralizedOp, communicator: _C.CountingCommunicator, reduce: _C.ReduceOp
    ) -> _C.BucketOp:
        if spec.codec is None:
            return _C.AllReduce(communicator, reduce)
        codec = _C.make_codec(spec.codec, self.device_type)
        return _C.CompressedAllReduce(
            communicator, codec, self.scratch, reduce, checksum=env.get_checksum()
        )


def comm_hook_op(spec: CommHookOp, buckets: Sequence[BaguaBucket], index: int) -> _C.CommHookOp:
    """The hook on bucket ``index``, which torch's GradBucket shows it among all ``buckets``."""
    return _C.CommHookOp(
        spec.hook,
        spec.state,
        index=index,
        count=len(buckets),
        parameters=buckets[index].tensors,
        offsets=[slot.offset for slot in buckets[index].slots()],
    )


def mixing_weights(sizes: list[int], member: int) -> tuple[float, float]:
    """What the left and the right neighbour of ``member`` count on a ring of members of ``sizes``.

    A third each among equals. Otherwise Metropolis-Hastings: a member takes less from a smaller
    one, so that the mean in which every member weighs its size stays what it is.
    """
    own = sizes[member]
    neighbours = (_C.ring_left(member, len(sizes)), _C.ring_right(member, len(sizes)))
    left, right = (min(1.0, sizes[neighbour] / own) / 3 for neighbour in neighbours)
    return left, right


def describe_op(op: BucketOp) -> str:
    if isinstance(op, CommHookOp):
        return f"comm hook {getattr(op.hook, '__qualname__', type(op.hook).__qualname__)}"
    if isinstance(op, PythonOp):
        return "python"
    if isinstance(op, MomentumOp):
        return "momentum"
    if isinstance(op, AsynchronousOp):
        return f"asynchronous every {op.sync_interval_ms} ms"
    if isinstance(op, RowsOp):
        return f"rows {op.sizes} average={op.average}"
    if isinstance(op, LowRankOp):
        return (
            f"hierarchical={op.hierarchical} low rank {op.matrices} warm_start={op.warm_start} "
            f"error_feedback={op.error_feedback} seed={op.seed}"
        )
    if isinstance(op, SparseOp):
        drawn = f"random seed={op.seed}" if op.random_sparse else "largest"
        owed = bool(op.memory.value(0).numel())
        return f"hierarchical={op.hierarchical} {drawn} {op.k} error_feedback={owed}"
    if isinstance(op, LowPrecisionDecentralizedOp):
        return f"hierarchical={op.hierarchical} ring codec={op.codec}"
    if isinstance(op, DecentralizedOp):
        return f"hierarchical={op.hierarchical} peers={op.peer_selection_mode}"
    return f"hierarchical={op.hierarchical} average={op.average} codec={op.codec}"


def between_nodes_only(op: BucketOp) -> str | None:
    """What a hierarchical op does between nodes and not inside one."""
    if isinstance(op, CentralizedOp) and op.hierarchical and op.codec is not None:
        return "compressed"
    if isinstance(op, LowPrecisionDecentralizedOp | LowRankOp | SparseOp) and op.hierarchical:
        return "compressed"
    if isinstance(op, DecentralizedOp) and op.hierarchical and op.peer_selection_mode != "all":
        return "gossiped"
    return None
