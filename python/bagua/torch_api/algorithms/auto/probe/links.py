"""Latency and bandwidth between ranks, by the transport that carries gradients."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._foresight.probe.links import MANY, latency_and_overhead, per_message
from bagua._foresight.probe.speeds import wait_for
from bagua._foresight.profile import Link
from bagua.torch_api.algorithms.auto.agreed import largest

__all__ = ["Links", "measure_links", "node_sizes"]

_TRIPS = 9
_FIRST_BYTES = 64 * 1024
_MOST_BYTES = 16 * 1024**2
_SECONDS = 0.04  # that a transfer is to take: longer than the burst that a shaped link lets through
_TRANSFERS = 3
_LEAST_SECONDS_PER_BYTE = 1e-12
_WHAT = "measuring the links of AutoAlgorithm"


@dataclass(frozen=True)
class Links:
    """Measured links of a group.

    Attributes:
        between: between nodes, or between all ranks where each node has one rank or all share one.
        inside: between ranks of a node; None: as between nodes.
    """

    between: Link
    inside: Link | None


def node_sizes(connections: Connections) -> tuple[int, ...]:
    """The number of ranks of each node, in the order of their first ranks."""
    nodes = connections.node_of_ranks()
    return tuple(nodes.count(node) for node in dict.fromkeys(nodes))


def measure_links(connections: Connections, device: torch.device) -> Links:
    """Measure what every rank sends and receives at the same time, on rings. All ranks call it.

    The ring between nodes is of their first ranks, as a ring over all ranks crosses from node to
    node once. The slowest rank counts. Takes a fifth of a second on links below 100 Mbit/s, and
    some milliseconds on fast ones.
    """
    communicator = connections.main_communicator(device)
    everyone = list(range(connections.size))
    nodes = connections.node_of_ranks()
    leaders = _C.leaders(nodes)
    if len(leaders) in (1, connections.size):
        between, inside = _Ring(connections, communicator, device, everyone).measure(), None
    else:
        between = _Ring(connections, communicator, device, leaders).measure()
        mine = _C.node_members(nodes, connections.rank)
        inside = _Ring(connections, communicator, device, mine).measure()
    return Links(between, inside)


class _Ring:
    """Transfers along a ring of ``members``; other ranks agree on sizes and times with them."""

    def __init__(
        self,
        connections: Connections,
        communicator: _C.CountingCommunicator,
        device: torch.device,
        members: list[int],
    ) -> None:
        self._connections = connections
        self._communicator = communicator
        self._device = device
        self._whole = len(members) == connections.size
        self._peers: tuple[int, int] | None = None
        if connections.rank in members and len(members) > 1:
            place = members.index(connections.rank)
            self._peers = members[(place + 1) % len(members)], members[place - 1]

    def measure(self) -> Link:
        """The slowest member's link. All ranks of the group call it together."""
        sent = statistics.median(self._transfer(8, 1, _TRIPS)[0])
        many = statistics.median(self._transfer(8, MANY, _TRIPS)[0])
        sent, many = largest(self._connections, _WHAT, [sent, many])
        latency, overhead = self._latency(sent)
        size, (first,) = _FIRST_BYTES, self._transfer(_FIRST_BYTES, 1, 1)[0]
        (seconds,) = largest(self._connections, _WHAT, [first])
        if seconds > 0:
            size = int(min(max(size * _SECONDS / seconds, size), _MOST_BYTES))
        # The first transfer fills windows and empties what a shaped link lets through at once.
        times, core = self._transfer(size, 1, 1 + _TRANSFERS)
        rest = max(statistics.median(times[1:]) - sent, 0.0) / size
        per_byte, core = largest(self._connections, _WHAT, [rest, core / size])
        bandwidth = 1 / max(per_byte, _LEAST_SECONDS_PER_BYTE)
        return Link(
            latency,
            bandwidth,
            min(core, 1 / bandwidth),
            messages=bandwidth,
            overhead=overhead,
            per_message=per_message(many, sent),
        )

    def _latency(self, sent: float) -> tuple[float, float]:
        """Latency, and overhead of a collective beyond it; ``sent``: seconds of a small message."""
        if not self._whole:
            return sent, 0.0
        one, times = torch.zeros(1, device=self._device), []
        for _ in range(1 + _TRIPS):
            begun = time.perf_counter()
            self._communicator.all_reduce(one, _C.ReduceOp.SUM)
            wait_for(self._device)
            times.append(time.perf_counter() - begun)
        (reduced,) = largest(self._connections, _WHAT, [statistics.median(times[1:])])
        return latency_and_overhead(self._connections.size, reduced, sent)

    def _transfer(self, size: int, messages: int, times: int) -> tuple[list[float], float]:
        """Seconds of each transfer of so many messages, and seconds of a core that one takes."""
        if self._peers is None:
            return [0.0] * times, 0.0
        out = torch.zeros(size, dtype=torch.uint8, device=self._device)
        right, left = self._peers
        sends = [(out, right)] * messages
        receives = [(torch.empty_like(out), left) for _ in range(messages)]
        self._communicator.exchange([(out[:1], right)], [(receives[0][0][:1], left)])
        seconds, core = [], time.process_time()
        for _ in range(times):
            begun = time.perf_counter()
            self._communicator.exchange(sends, receives)
            wait_for(self._device)
            seconds.append(time.perf_counter() - begun)
        return seconds, (time.process_time() - core) / times
