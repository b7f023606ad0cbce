"""A lane under construction: communicators and scratch memory of one thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.group.process_group import BaguaProcessGroup, Hierarchy

Members = _C.CountingCommunicator


@dataclass
class Lane:
    """One lane under construction; its communicators are connected on demand."""

    name: str  # unique within the job
    device: torch.device
    group: BaguaProcessGroup  # for operations that name none
    sums_of_torch: bool = False  # see Connections.connect
    scratch: _C.Scratch = field(default_factory=_C.Scratch)
    #: By (ranks, purpose): "all", "node", "leaders", and for shares "leaders" with a number.
    communicators: dict[tuple[str, str], Members] = field(default_factory=dict)
    _shares: dict[str, tuple[Members, list[Members | None]]] = field(default_factory=dict)

    @property
    def by_purpose(self) -> list[tuple[str, Members]]:
        return [(purpose, members) for (_, purpose), members in self.communicators.items()]

    def connections(self, group: BaguaProcessGroup | None) -> Connections:
        return (group or self.group).connections

    def communicator(self, group: BaguaProcessGroup | None) -> Members:
        connections = self.connections(group)
        key = (repr(connections.ranks), "all")
        if key not in self.communicators:
            self.communicators[key] = connections.connect(
                f"{self.name}/all", self.device, sums_of_torch=self.sums_of_torch
            )
        return self.communicators[key]

    def nodes(self, group: BaguaProcessGroup | None) -> tuple[Members, Members | None]:
        """This rank's node and, on its leader, the leaders of the nodes if there are several."""
        connections = self.connections(group)
        ranks = repr(connections.ranks)
        if (ranks, "node") not in self.communicators:
            node, leaders = connections.connect_nodes(self.name, self.device)
            self.communicators[ranks, "node"] = node
            if leaders is not None:
                self.communicators[ranks, "leaders"] = leaders
        return self.communicators[ranks, "node"], self.communicators.get((ranks, "leaders"))

    def shares(self, group: BaguaProcessGroup | None) -> tuple[Members, list[Members | None]]:
        """This rank's node and, for each share, the ranks that have it; None where this has not."""
        connections = self.connections(group)
        ranks = repr(connections.ranks)
        if ranks not in self._shares:
            node, between = connections.connect_shares(self.name, self.device)
            self._shares[ranks] = node, between
            self.communicators[f"{ranks} by share", "node"] = node
            for number, members in enumerate(between):
                if members is not None:
                    self.communicators[f"{ranks} by share", f"leaders{number}"] = members
        return self._shares[ranks]


def among(
    lane: Lane,
    group: BaguaProcessGroup | None,
    hierarchical: Hierarchy,
    make: Callable[[Members], _C.BucketOp],
    reduce: _C.ReduceOp = _C.ReduceOp.AVG,
) -> _C.BucketOp:
    """The op that ``make`` makes among all ranks or, if ``hierarchical``, between the nodes."""
    if not hierarchical:
        return make(lane.communicator(group))
    if hierarchical == "sharded":
        connections = lane.connections(group)
        nodes = len(_C.leaders(connections.node_of_ranks()))
        node, between = lane.shares(group)
        inner = [None if members is None else make(members) for members in between]
        return _C.ShardedHierarchical(node, inner, lane.scratch, connections.size, nodes, reduce)
    return _hierarchical(lane, group, lane.connections(group).size, reduce, make)


def among_weighted(
    lane: Lane,
    group: BaguaProcessGroup | None,
    hierarchical: bool,
    make: Callable[[Members, list[int]], _C.BucketOp],
) -> _C.BucketOp:
    """An op that weighs its members, ranks or nodes, by their numbers of ranks itself."""
    connections = lane.connections(group)
    if not hierarchical:
        return make(lane.communicator(group), [1] * connections.size)
    nodes = connections.node_of_ranks()
    sizes = [nodes.count(nodes[leader]) for leader in _C.leaders(nodes)]
    # Not to weigh twice: to Hierarchical all nodes are as large as this one.
    ranks = nodes.count(nodes[connections.rank]) * len(sizes)
    return _hierarchical(lane, group, ranks, _C.ReduceOp.AVG, lambda leaders: make(leaders, sizes))


def _hierarchical(
    lane: Lane,
    group: BaguaProcessGroup | None,
    ranks: int,
    reduce: _C.ReduceOp,
    between_leaders: Callable[[Members], _C.BucketOp],
) -> _C.BucketOp:
    node, leaders = lane.nodes(group)
    inner = None if leaders is None else between_leaders(leaders)
    nodes = len(_C.leaders(lane.connections(group).node_of_ranks()))
    return _C.Hierarchical(node, inner, ranks, nodes, reduce)
