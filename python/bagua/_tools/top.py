"""``bagua top``: reads a job's publications and shows them, until the user or the job ends it."""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bagua import BaguaError
from bagua._core.group.rendezvous import connect_store, whole
from bagua._core.state.statistics import less_for
from bagua._tools.meeting import (
    Meeting,
    MissingReplyError,
    StoreTimeoutError,
    finite,
    made,
    text,
)
from bagua._watch.publisher import KEY, TIMES

SUMMARY = "show a running job, rank by rank"
DESCRIPTION = """\
Shows a running job that was started with BAGUA_TOP=1 in the environment of its
ranks (the seconds from one publication of their statistics to the next).

  step, steps/s  steps that communicated
  sent           payload that the rank has sent, between and inside nodes
  wire           share of the time in communicators, waiting for others included
  enc            share of the time encoding, decoding and adding
  wait           share of the time that full buckets waited for their turn
  blocked        share of the time that training was blocked
  slowest        the rank for which the others wait; the last line says by how
                 much its batch is too large

It ends with the job, or by Ctrl-C.
"""

_CLEAR = "\x1b[H\x1b[J"
_PATIENCE = timedelta(seconds=5)
_SILENT_PUBLICATIONS = 5  # of which nothing was heard
_BLOCKED = 0.1  # share of its time that a rank waits for a straggler, at least
_COMPUTES = 0.02  # share of its time that a rank does not wait, at least, to compare by it
_NUMBERS = ("world", "rank", "node", "pid", "number", "rounds", "bytes_sent", "bytes_received")
_MOST = {"world": 1 << 16, "rank": 1 << 16}  # of the numbers; of others what 63 bits say
_WIDTH = 80
_HEADER = (
    f"{'rank':>4} {'host':<12} {'step':>9} {'steps/s':>8} {'sent MB/s':>9} "
    f"{'wire':>5} {'enc':>5} {'wait':>5} {'blocked':>7}"
)

Publication = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store",
        nargs="?",
        metavar="HOST:PORT",
        help="MASTER_ADDR and MASTER_PORT of the job (found, if it has ranks on this machine)",
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (1)"
    )
    parser.add_argument("--once", action="store_true", help="print one table and end")


def main(arguments: argparse.Namespace) -> int:
    stores = [arguments.store] if arguments.store else stores_here()
    if len(stores) != 1:
        which = f"several jobs publish here, name one: {' '.join(stores)}" if stores else ""
        return _fail(
            which
            or "no job on this machine publishes; start it with BAGUA_TOP=1, or give HOST:PORT"
        )
    try:
        store = connect_store(stores[0], _PATIENCE)
    except ValueError:
        return _fail(f"{stores[0]} is not a HOST:PORT")
    except BaguaError:
        return _fail(f"there is no job's store at {stores[0]}")
    job = _Job(Meeting(store), stores[0])
    try:
        _show(job, arguments)
    except StoreTimeoutError:
        return _fail(f"the job's store at {stores[0]} has gone")
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    return 0


class _Job:
    """Publications of a job's ranks, the last two of each."""

    def __init__(self, meeting: Meeting, name: str) -> None:
        self._meeting = meeting
        self._name = name
        self._now: dict[int, Publication] = {}
        self._before: dict[int, Publication] = {}
        self._seen: dict[int, float] = {}
        self._refused = ""

    @property
    def complete(self) -> bool:
        return len(self._before) == self._world > 0

    @property
    def ended(self) -> bool:
        ranks = list(self._now.values())
        return len(ranks) == self._world > 0 and all(word["ended"] for word in ranks)

    @property
    def _world(self) -> int:
        return max((word["world"] for word in self._now.values()), default=0)

    def look(self) -> None:
        for rank in range(max(1, self._world)):
            try:
                word = self._meeting.read(KEY.format(rank=rank), 0.0, partial(_of_rank, rank))
            except MissingReplyError:
                continue
            except BaguaError as error:  # another one has written there
                self._refused = str(error)
                continue
            known = self._now.get(rank)
            if known and known["number"] == word["number"]:
                continue
            if known:
                self._before[rank] = known
            self._now[rank] = word
            self._seen[rank] = time.monotonic()

    def lines(self) -> list[str]:
        title = f"bagua top: {self._name}"
        if not self._now:
            wait = "waiting for the ranks' first publication (BAGUA_TOP=1)"
            return [title, "", wait, *self._warning()]
        ages = {rank: time.monotonic() - seen for rank, seen in self._seen.items()}
        rows = rows_of(self._now, self._before, ages)
        return [*table(rows, self._world, title), *self._warning()]

    def _warning(self) -> list[str]:
        return textwrap.wrap(self._refused, _WIDTH)


def _show(job: _Job, arguments: argparse.Namespace) -> None:
    live = sys.stdout.isatty() and not arguments.once
    while True:
        job.look()
        if live or job.complete or not arguments.once:
            lines = job.lines()[: shutil.get_terminal_size().lines - 1 if live else None]
            sys.stdout.write((_CLEAR if live else "") + "\n".join(lines) + "\n")
            sys.stdout.flush()
        if job.ended or (arguments.once and job.complete):
            return
        time.sleep(arguments.interval)


def _fail(text: str) -> int:
    sys.stderr.write(f"bagua top: {text}\n")
    return 1


# Running jobs on this machine.


def stores_here() -> list[str]:
    """``host:port`` of the stores of jobs that publish, from environments of this user's ranks."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            entries = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # another user's, or gone
            continue
        variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        host, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
        if variables.get("BAGUA_TOP", "0") != "0" and host and port:
            found.add(f"{host}:{port}")
    return sorted(found)


# The table.


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
    try:
        numbers = {key: whole(word[key], _MOST.get(key, 1 << 63)) for key in (*_NUMBERS, *TIMES)}
        return {
            **numbers,
            "at": finite(word["at"]),
            "every": finite(word["every"], 0.0),
            "host": text(word["host"]),
            "ended": word["ended"] is True,
        }
    except (ValueError, TypeError, LookupError):
        return None


def _of_rank(rank: int, word: Any) -> Publication:
    publication = made(publication_from(word))
    if not publication["rank"] == rank < publication["world"]:
        raise ValueError(word)
    return publication


def rows_of(
    now: Mapping[int, Publication], before: Mapping[int, Publication], age: Mapping[int, float]
) -> list[Row]:
    """A row for every rank that has published.

    ``before``: the publications before those of ``now``; without one rates are 0. ``age``: seconds
    since ``now`` of a rank was first seen.
    """
    rows = [_row(now[rank], before.get(rank)) for rank in sorted(now)]
    marks = [
        "ended"
        if now[row.rank]["ended"]
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
    lines = [f"{title}, {len(rows)} of {world} rank(s)"[:_WIDTH], "", _HEADER]
    for row in rows:
        line = (
            f"{row.rank:>4} {row.host[:12]:<12} {row.step:>9} {row.steps:>8.2f} "
            f"{row.sent / 1e6:>9.2f} {row.wire:>5.0%} {row.encode:>5.0%} {row.waiting:>5.0%} "
            f"{row.blocked:>7.0%} {row.mark}"
        )
        lines.append(line.rstrip()[:_WIDTH])
    return [*lines, *_advice(rows)]


def _advice(rows: Sequence[Row]) -> list[str]:
    """How much less the slowest rank is to get, where the others' own time is known."""
    slow = [1 - row.blocked for row in rows if row.mark == "slowest"]
    others = [1 - row.blocked for row in rows if not row.mark]
    if not slow or statistics.median(others) < _COMPUTES:
        return []
    times = slow[0] / statistics.median(others)
    (rank,) = (row.rank for row in rows if row.mark == "slowest")
    return ["", less_for(rank, times)]


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
