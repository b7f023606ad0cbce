"""Lanes that run the operations of buckets beside a training, on the clock of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bagua._foresight.model.events import Timeline
from bagua._foresight.model.network import Stage
from bagua._foresight.prediction import Span

__all__ = ["Lanes", "union"]


class Lanes:
    """The lanes of one rank; buckets go to them in turn, and each takes its own in order.

    Args:
        timeline: of the rank, to which tasks are added.
        count: of lanes.
        begin: a task before the first operation; None: there is none.
    """

    def __init__(self, timeline: Timeline, count: int, begin: int | None) -> None:
        self._timeline = timeline
        self._last: list[int | None] = [begin] * count
        self._spans: list[tuple[int, int, int]] = []  # tasks: ready, first, last
        self.sent = 0

    def run(self, ready: int, stages: Iterable[Stage]) -> None:
        """The operations of the next bucket, which is ready when a task has ended."""
        lane = len(self._spans) % len(self._last)
        first = last = self._timeline.add(0.0, after=(ready, self._last[lane]))
        for stage in stages:
            last = self._stage(stage, last)
            self.sent += stage.sent
        self._last[lane] = last
        self._spans.append((ready, first, last))

    @property
    def ends(self) -> list[int | None]:
        """The tasks that end each lane."""
        return self._last

    def spans(self) -> tuple[Span, ...]:
        """Spans of the buckets, after the timeline has run."""
        end = self._timeline.end
        return tuple(Span(end[ready], end[first], end[last]) for ready, first, last in self._spans)

    def _stage(self, stage: Stage, last: int) -> int:
        add = self._timeline.add
        if stage.before:
            last = add(stage.before, cores=1.0, after=(last,))
        if stage.link is None:
            return add(stage.during, cores=1.0, after=(last,)) if stage.during else last
        if stage.latency:
            last = add(stage.latency, after=(last,))
        if stage.wake:
            last = add(stage.wake, wakes=True, after=(last,))
        arrival, done = last, last
        for _ in range(stage.pieces):
            arrival = add(
                stage.wire / stage.pieces, cores=stage.cores, link=stage.link, after=(arrival,)
            )
            if stage.during:
                done = add(stage.during / stage.pieces, cores=1.0, after=(arrival, done))
            else:
                done = arrival
        return done


def union(spans: Sequence[Span]) -> float:
    """Seconds in which at least one span is under way."""
    total, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total
