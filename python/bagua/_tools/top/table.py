"""The table: what each rank has done since its publication before."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bagua._tools.report import printable
from bagua._watch.publisher import TIMES

__all__ = ["Publication", "Row", "publication_from", "rows_of", "table"]

_SILENT_PUBLICATIONS = 5  # of which nothing was heard
_BLOCKED = 0.1  # share of its time that a rank waits for a straggler, at least
_NUMBERS = ("world", "rank", "node", "pid", "number", "rounds", "bytes_sent", "bytes_received")
_SECONDS = ("at", "every")
_HEADER = (
    f"{'rank':>4} {'host':<12} {'step':>9} {'steps/s':>8} {'sent MB/s':>9} "
    f"{'wire':>5} {'enc':>5} {'wait':>5} {'blocked':>7}"
)

Publication = dict[str, Any]


class Row(NamedTuple):
    """One rank between two publications; times are shares of the time in between."""

    rank: int
    host: str
    step: int
    steps: float
    sent: float
    wire: float
    encode: float
    waiting: float
    blocked: float
    mark: str


def publication_from(word: Any) -> Publication | None:
    """The publication of a rank, which is JSON; None if it is none."""
    if not isinstance(word, dict) or type(word.get("host")) is not str:
        return None
    integers = (word.get(key) for key in (*_NUMBERS, *TIMES))
    seconds = (word.get(key) for key in _SECONDS)
    if not all(type(number) is int for number in integers):
        return None
    if not all(type(number) in (int, float) for number in seconds):
        return None
    return {**word, "host": printable(word["host"][:100])}


def rows_of(
    now: Mapping[int, Publication], before: Mapping[int, Publication], age: Mapping[int, float]
) -> list[Row]:
    """A row for every rank that has published.

    ``before``: by rank, the publication before that of ``now``; where there is none, rates are 0.
    ``age``: seconds since ``now`` of a rank was first seen.
    """
    rows = [_row(now[rank], before.get(rank)) for rank in sorted(now)]
    marks = [
        "ended"
        if now[row.rank].get("ended") is True
        else "silent"
        if age[row.rank] > _SILENT_PUBLICATIONS * now[row.rank]["every"]
        else ""
        for row in rows
    ]
    slow = _straggler([row for row, mark in zip(rows, marks, strict=True) if not mark])
    return [
        row._replace(mark="slowest" if row.rank == slow else mark)
        for row, mark in zip(rows, marks, strict=True)
    ]


def table(rows: Sequence[Row], world: int, title: str) -> list[str]:
    """The lines of the table, of at most 80 columns."""
    lines = [f"{title}, {len(rows)} of {world} rank(s)"[:80], "", _HEADER]
    for row in rows:
        line = (
            f"{row.rank:>4} {row.host[:12]:<12} {row.step:>9} {row.steps:>8.2f} "
            f"{row.sent / 1e6:>9.2f} {row.wire:>5.0%} {row.encode:>5.0%} {row.waiting:>5.0%} "
            f"{row.blocked:>7.0%} {row.mark}"
        )
        lines.append(line.rstrip()[:80])
    return lines


def _row(now: Publication, before: Publication | None) -> Row:
    seconds = 0.0 if before is None else now["at"] - before["at"]
    zero = Row(now["rank"], now["host"], now["rounds"], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "")
    if before is None or seconds <= 0 or now["pid"] != before["pid"]:
        return zero

    def rate(key: str) -> float:
        # Counters begin anew with new buckets.
        return float(max(0, now[key] - before[key])) / seconds

    wire, encode, waiting, exposed = (rate(key) / 1e9 for key in TIMES)
    return zero._replace(
        steps=rate("rounds"),
        sent=rate("bytes_sent"),
        wire=wire,
        encode=encode,
        waiting=waiting,
        blocked=exposed,
    )


def _straggler(rows: Sequence[Row]) -> int | None:
    """The rank for which the others wait: they are blocked, and it is not."""
    if len(rows) < 2:
        return None
    least = min(rows, key=lambda row: row.blocked)
    others = statistics.median(row.blocked for row in rows if row is not least)
    return least.rank if others > _BLOCKED and least.blocked < others / 2 else None
