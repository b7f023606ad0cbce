"""The last stage of ``AutoAlgorithm``: notices that links have changed for long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bagua._core.group.connections import Connections
from bagua._foresight.profile import Link, Profile
from bagua.torch_api.algorithms.auto.agreed import largest
from bagua.torch_api.algorithms.auto.probe.links import Links

__all__ = ["Watching", "changed", "renewed"]

_WHAT = "watching the links for AutoAlgorithm"
_SECONDS = 2.0  # of a window
_LEAST_ROUNDS, _MOST_ROUNDS = 20, 500
#: Windows in a row that must differ from the first ones.
_WINDOWS = 3
_FACTOR = 2.0
#: Of a measurement; the rate of a window contains waiting for other ranks, too.
_CHANGED = 1.5


class Watching:
    """Compares the bytes per second on the wire with those after the choice, window by window.

    A rank that waits for a slower one sees a slow wire, and the slowest rank waits least: the
    fastest rate of all ranks counts. It costs an all-reduce of one number per window.

    Args:
        step_seconds: of one round, equal on all ranks.
    """

    def __init__(self, connections: Connections, step_seconds: float) -> None:
        self._connections = connections
        wanted = math.ceil(_SECONDS / max(step_seconds, 1e-6))
        self.rounds_per_window = min(max(wanted, _LEAST_ROUNDS), _MOST_ROUNDS)
        self._rounds = 0
        self._last: tuple[int, int] | None = None
        self._reference = 0.0
        self._differing = 0

    def round_ended(self, stats: Mapping[str, Any] | None) -> bool:
        """Called after each round; True if the wire has differed for long, on all ranks alike.

        ``stats``: ``bagua_stats()["total"]`` where :meth:`needs_stats`, else None.
        """
        if stats is None:
            return False
        now = int(stats["bytes_sent"]), int(stats["wire_ns"])
        before, self._last = self._last, now
        if before is None:  # the first window: buckets have just been built
            return False
        sent, waited = now[0] - before[0], now[1] - before[1]
        rate = sent / waited if sent > 0 and waited > 0 else 0.0
        (rate,) = largest(self._connections, _WHAT, [rate])
        if rate == 0.0:
            return False
        if self._reference == 0.0:
            self._reference = rate
            return False
        near = self._reference / _FACTOR < rate < self._reference * _FACTOR
        self._differing = 0 if near else self._differing + 1
        return self._differing >= _WINDOWS

    def needs_stats(self) -> bool:
        """Count a round; whether a window ends with it."""
        self._rounds += 1
        if self._rounds < self.rounds_per_window:
            return False
        self._rounds = 0
        return True

    def begin_anew(self, *, false_alarm: bool) -> None:
        """Take the next windows for the reference; after a false alarm they are twice as long."""
        self._last, self._reference, self._differing, self._rounds = None, 0.0, 0, 0
        if false_alarm:
            self.rounds_per_window *= 2


def changed(profile: Profile, links: Links) -> bool:
    """Whether a bandwidth has changed by half since the profile's were measured."""
    pairs = [(profile.between, links.between), (profile.inside, links.inside)]
    return any(
        not 1 / _CHANGED < new.bandwidth / _of_messages(old) < _CHANGED
        for old, new in pairs
        if old is not None and new is not None
    )


def renewed(profile: Profile, links: Links) -> Profile:
    """``profile`` with newly measured links; what all-reduces reached of the old ones stays."""
    between = _renewed(profile.between, links.between)
    inside = profile.inside
    if inside is not None and links.inside is not None:
        inside = _renewed(inside, links.inside)
    return replace(profile, between=between, inside=inside)


def _of_messages(link: Link) -> float:
    return link.messages or link.bandwidth


def _renewed(old: Link, new: Link) -> Link:
    bandwidth = old.bandwidth * new.bandwidth / _of_messages(old)
    return replace(
        old,
        latency=new.latency,
        bandwidth=bandwidth,
        messages=new.bandwidth,
        processor=new.processor,
    )
