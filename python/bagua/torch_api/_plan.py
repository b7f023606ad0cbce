"""From buckets to an engine: lanes, communicators, ops, and the plan's description."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bagua import _C
from bagua.torch_api._transport import Transport, fingerprint
from bagua.torch_api.bucket import BaguaBucket, CentralizedOp, DecentralizedOp, PythonOp
from bagua.torch_api.communication import BaguaProcessGroup

__all__ = ["Plan", "build", "with_total"]

BucketOp = CentralizedOp | DecentralizedOp | PythonOp


@dataclass
class Plan:
    """An engine and where each tensor of each bucket is in it."""

    engine: _C.Engine
    slots: dict[str, int]


@dataclass
class _LaneBuilder:
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


def _describe_op(op: BucketOp) -> str:
    if isinstance(op, PythonOp):
        return "python"
    if isinstance(op, DecentralizedOp):
        return f"hierarchical={op.hierarchical} peers={op.peer_selection_mode}"
    return f"hierarchical={op.hierarchical} average={op.average} codec={op.codec}"


def _describe(buckets: Sequence[BaguaBucket]) -> list[str]:
    lines = []
    for bucket in buckets:
        ops = [_describe_op(op) for op in bucket.ops]
        flat = bucket.backend_tensor
        lines.append(f"bucket {bucket.name}: {flat.numel()} x {flat.dtype}, ops {ops}")
        lines += [f"bucket {bucket.name}: {slot.name} at {slot.offset}" for slot in bucket.slots()]
    return lines


def _divide_on_the_way_in(
    bucket: BaguaBucket, group: BaguaProcessGroup
) -> tuple[list[BucketOp], float]:
    """The ops of a bucket, and the factor for gradients as they are put into it.

    gloo has no mean: dividing takes a pass over memory, which is free where the gradient is copied
    anyway. So the mean of gradients is the sum of divided gradients, as in torch's DDP.
    """
    match bucket.ops:
        case [CentralizedOp(hierarchical=False, average=True, codec=None) as mean]:
            on_cpu = bucket.backend_tensor.device.type == "cpu"
            if bucket.gradients and on_cpu:
                return [replace(mean, average=False)], 1.0 / (mean.group or group).size
    return bucket.ops, 1.0


def _between_nodes_only(op: BucketOp) -> str | None:
    """What a hierarchical op does between nodes and not inside one."""
    if isinstance(op, CentralizedOp) and op.hierarchical and op.codec is not None:
        return "compressed"
    if isinstance(op, DecentralizedOp) and op.hierarchical and op.peer_selection_mode != "all":
        return "gossiped"
    return None


def _warn_one_node(group: BaguaProcessGroup, buckets: Sequence[BaguaBucket]) -> None:
    missing = [done for bucket in buckets for op in bucket.ops if (done := _between_nodes_only(op))]
    if missing and group.size > 1 and len(set(group.transport.node_of_ranks())) == 1:
        verb = {"compressed": "compress", "gossiped": "gossip"}[missing[0]]
        warnings.warn(
            "hierarchical=True is exact inside a node, and all ranks share one node: nothing is "
            f"{missing[0]}. Pass hierarchical=False to {verb} between the ranks of a node.",
            stacklevel=2,
        )


def _number_of_lanes() -> int:
    lanes = int(os.environ.get("BAGUA_LANES", "1"))
    if not 1 <= lanes <= 16:
        raise ValueError(f"BAGUA_LANES={lanes} must be between 1 and 16")
    return lanes


def build(buckets: Sequence[BaguaBucket], group: BaguaProcessGroup, name: str, wrap: str) -> Plan:
    """Build the engine of a module.

    Every rank of ``group`` calls it with equal buckets.

    Raises:
        BaguaMismatchError: the ranks' buckets differ; lists the first difference.
    """
    transport = group.transport
    description = _describe(buckets)
    transport.agree("their buckets", description)
    _warn_one_node(group, buckets)
    count = min(_number_of_lanes(), max(1, len(buckets)))
    builders = [
        _LaneBuilder(f"{wrap}/lane{i}", buckets[0].backend_tensor.device.type if buckets else "cpu")
        for i in range(count)
    ]
    native: list[list[_C.Bucket]] = [[] for _ in range(count)]
    order: list[list[str]] = [[] for _ in range(count)]
    for i, bucket in enumerate(buckets):
        builder = builders[i % count]
        slots = bucket.slots()
        specs, adopt_scale = _divide_on_the_way_in(bucket, group)
        ops = [builder.op(spec, group) for spec in specs]
        native[i % count].append(
            _C.Bucket(bucket.name, bucket.backend_tensor, slots, ops, adopt_scale)
        )
        order[i % count] += [slot.name for slot in slots]
    lanes = [_C.Lane(native[i], list(builders[i].communicators.values())) for i in range(count)]
    board = None
    if transport.size > 1:
        board = _C.FailureBoard(transport.board_store(wrap), transport.rank, transport.size)
    engine = _C.Engine(
        lanes,
        name=name,
        fingerprint=fingerprint(description),
        incarnation=transport.incarnation(wrap),
        timeout_s=transport.timeout.total_seconds(),
        control=transport.connect(f"{wrap}/control", "cpu"),
        board=board,
    )
    names = [slot for lane in order for slot in lane]
    return Plan(engine, {slot: i for i, slot in enumerate(names)})


def with_total(stats: dict[str, Any]) -> dict[str, Any]:
    """An engine's statistics with the sum over its buckets added as ``total``."""
    numbers = [
        key
        for key, value in stats["buckets"][0].items()
        if isinstance(value, int) and key != "rounds"
    ]
    total = {key: sum(bucket[key] for bucket in stats["buckets"]) for key in numbers}
    return {**stats, "total": total}
