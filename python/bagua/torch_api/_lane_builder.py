"""From the description of an operation to the C++ op, on the communicators of one lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bagua import _C
from bagua.torch_api._bucket_ops import (
    AsynchronousOp,
    BucketOp,
    CentralizedOp,
    DecentralizedOp,
    PythonOp,
)
from bagua.torch_api._transport import Transport
from bagua.torch_api.communication import BaguaProcessGroup

__all__ = ["LaneBuilder", "between_nodes_only", "describe_op"]


@dataclass
class LaneBuilder:
    """The communicators of one lane, made on demand."""

    name: str
    device_type: str
    scratch: _C.Scratch = field(default_factory=_C.Scratch)
    communicators: dict[tuple[str, str], _C.CountingCommunicator] = field(default_factory=dict)

    def communicator(
        self, transport: Transport, purpose: str, members: list[int] | None = None
    ) -> _C.CountingCommunicator:
        key = (repr(transport.ranks), purpose)
        if key not in self.communicators:
            self.communicators[key] = transport.connect(
                f"{self.name}/{purpose}", self.device_type, members
            )
        return self.communicators[key]

    def op(self, spec: BucketOp, default: BaguaProcessGroup) -> _C.BucketOp:
        if isinstance(spec, PythonOp):
            return _C.PythonOp(spec.function)
        if isinstance(spec, DecentralizedOp):
            averaging = self._averaging(spec, default)
            return _C.AverageWeights(spec.peer_weight, spec.communications, averaging)
        if isinstance(spec, AsynchronousOp):
            raise ValueError("asynchronous averaging cannot be mixed with other operations")
        transport = (spec.group or default).transport
        reduce = _C.ReduceOp.AVG if spec.average else _C.ReduceOp.SUM
        if not spec.hierarchical:
            return self._flat_op(spec, self.communicator(transport, "all"), reduce)
        return self._hierarchical(
            transport, transport.size, reduce, lambda leaders: self._flat_op(spec, leaders, reduce)
        )

    def _averaging(self, spec: DecentralizedOp, default: BaguaProcessGroup) -> _C.BucketOp:
        if spec.peer_selection_mode == "all":
            return self.op(CentralizedOp(spec.hierarchical, True, None, spec.group), default)
        transport = (spec.group or default).transport
        if not spec.hierarchical:
            everyone = self.communicator(transport, "all")
            return _C.Gossip(everyone, spec.communications, [1] * transport.size, self.scratch)
        nodes = transport.node_of_ranks()
        sizes = [nodes.count(nodes[leader]) for leader in _C.leaders(nodes)]
        # Gossip weighs the nodes, pair by pair: to Hierarchical all are as large as this one.
        ranks = nodes.count(nodes[transport.rank]) * len(sizes)
        return self._hierarchical(
            transport,
            ranks,
            _C.ReduceOp.AVG,
            lambda leaders: _C.Gossip(leaders, spec.communications, sizes, self.scratch),
        )

    def _hierarchical(
        self,
        transport: Transport,
        ranks: int,
        reduce: _C.ReduceOp,
        between_leaders: Callable[[_C.CountingCommunicator], _C.BucketOp],
    ) -> _C.BucketOp:
        nodes = transport.node_of_ranks()
        leaders = _C.leaders(nodes)
        mine = _C.node_members(nodes, transport.rank)
        node = self.communicator(transport, f"node{mine[0]}", mine)
        inner = None
        if transport.rank in leaders and len(leaders) > 1:
            inner = between_leaders(self.communicator(transport, "leaders", leaders))
        return _C.Hierarchical(node, inner, ranks, len(leaders), reduce)

    def _flat_op(
        self, spec: CentralizedOp, communicator: _C.CountingCommunicator, reduce: _C.ReduceOp
    ) -> _C.BucketOp:
        if spec.codec is None:
            return _C.AllReduce(communicator, reduce)
        return _C.CompressedAllReduce(communicator, _C.make_codec(spec.codec), self.scratch, reduce)


def describe_op(op: BucketOp) -> str:
    if isinstance(op, PythonOp):
        return "python"
    if isinstance(op, AsynchronousOp):
        return f"asynchronous every {op.sync_interval_ms} ms"
    if isinstance(op, DecentralizedOp):
        return f"hierarchical={op.hierarchical} peers={op.peer_selection_mode}"
    return f"hierarchical={op.hierarchical} average={op.average} codec={op.codec}"


def between_nodes_only(op: BucketOp) -> str | None:
    """What a hierarchical op does between nodes and not inside one."""
    if isinstance(op, CentralizedOp) and op.hierarchical and op.codec is not None:
        return "compressed"
    if isinstance(op, DecentralizedOp) and op.hierarchical and op.peer_selection_mode != "all":
        return "gossiped"
    return None
