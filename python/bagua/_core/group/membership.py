"""The members of an elastic group: who lives, who belongs, and how a process comes back.

They agree through the job's store.

Note [Generations]
A generation is a set of members with connections of their own, whose keys have a prefix of their
own. The next one is decided by a single ``compare_set`` on one key of the store, so there is never
more than one, however the network is cut: the store is the referee.

1. Each member of a generation that has failed, or has seen a request to join, writes that it is
   here, and a report of its state.
2. It waits until each other member is here too, or has been silent for some seconds, or twice the
   group's timeout is over: the first is for a rank that waits in a collective.
3. It proposes those that are here, and the processes that wait to join and are alive. The first
   proposal is the decision.
4. A member that is not in it, because it was taken for dead, raises. So do all if fewer are left
   than they must be.

A member of several processes, an island, has one that does this, its leader. The others read the
decision: all of them have agreed that there is to be one.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua import _C
from bagua._core.group.rendezvous import stored_number, stored_value, wait_for_keys

_PAUSE = 0.05  # seconds between two looks at the store
_SOMEONE_JOINS = -1  # among the late ones of a round
_KEY = "bagua/elastic"  # the incarnation that began last
#: A process whose heartbeat has not changed for so long is dead, stopped or cut off. There are two
#: heartbeats a second, from a thread that does not need the interpreter.
SECONDS_OF_SILENCE = 5.0

#: Counters of a member.
Report = dict[str, int]


@dataclass(frozen=True)
class Change:
    """A decision, in global ranks.

    Attributes:
        joined: members that are new.
        returned: members that were late for a round.
        reports: of the members that stay.
    """

    generation: int
    members: list[int]
    joined: list[int]
    returned: list[int]
    lost: list[int]
    reports: dict[int, Report]


@dataclass(frozen=True)
class Decision:
    """A generation, as the store has it.

    Attributes:
        members: names of their lives, by global rank.
        joined: global ranks of the new ones, by number of their request.
        requests: how many there had been, answered or not.
        returned: those of the new ones that were late, and keep their state.
    """

    members: dict[int, str]
    joined: dict[int, int]
    requests: int
    returned: list[int]

    def stay(self) -> list[int]:
        return [rank for rank in sorted(self.members) if rank not in self.joined.values()]

    def text(self) -> str:
        return json.dumps(asdict(self))


class Life:
    """Heartbeats of this process, until the object is deleted; its name is random."""

    def __init__(self, store: c10d.Store) -> None:
        self.name = secrets.token_hex(8)
        self._board = _C.FailureBoard(_lives(store, self.name), 0, 1)
        self._board.beat(0, "alive")


class _Seen(NamedTuple):
    beat: bytes
    at: float


class Pulse:
    """Watches the heartbeats of other processes: :meth:`silent` is asked again and again."""

    def __init__(self, store: c10d.Store) -> None:
        self._store = store
        self._first: dict[str, bytes] = {}
        self._last: dict[str, _Seen] = {}

    def silent(self, name: str) -> bool:
        """Whether the heartbeat of that :class:`Life` has not changed for some seconds."""
        beat, now = self._look(name), time.monotonic()
        self._first.setdefault(name, beat)
        last = self._last.get(name)
        if last is None or last.beat != beat:
            self._last[name] = _Seen(beat, now)
            return False
        return now - last.at > SECONDS_OF_SILENCE

    def beats(self, name: str) -> bool:
        """Whether the heartbeat has changed since :meth:`silent` was first asked."""
        return name in self._first and self._look(name) != self._first[name]

    def _look(self, name: str) -> bytes:
        store = _lives(self._store, name)
        return bytes(store.get("beat/0")) if store.check(["beat/0"]) else b""


def _lives(store: c10d.Store, name: str) -> c10d.Store:
    return c10d.PrefixStore(f"life/{name}", store)


@contextmanager
def store_needed() -> Iterator[None]:
    """Failures of the store inside become a :class:`BaguaError`."""
    try:
        yield
    except _C.BaguaError:
        raise
    except dist.DistError as error:
        raise _C.BaguaError(
            "the job's store does not answer, without which the ranks cannot agree on who is left: "
            f"{error}. It must outlive ranks: that of torchrun's agent does, that of rank 0's own "
            "process is lost with it (docs/slow-networks.md)."
        ) from error


class Membership:
    """This process in an elastic group. Main thread only; without the store BaguaError is raised.

    Args:
        store: of the group, for all of its generations.
        rank: the global one of this process, or the number of its island.
        timeout: after which a member that lives and does not come is given up.
        leads: False: another process of this member writes and decides.
        called: what members are called in errors.

    Attributes:
        owner: returns what makes the group's changes, for one wrapped module at a time, or None.
        lives: names of the members' lives, by global rank.
    """

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        timeout: timedelta,
        *,
        leads: bool = True,
        called: str = "rank",
    ) -> None:
        self.owner: Callable[[], object | None] = lambda: None
        self.generation = 0
        self.lives: dict[int, str] = {}
        self._store = store
        self._rank = rank
        self._life = Life(store) if leads else None
        self._timeout = timeout
        self._called = called
        self._settled_requests = 0
        self._gathered = 0  # rounds of this generation
        self._late: list[int] = []  # that the next generation goes on without

    def found(self, ranks: list[int]) -> None:
        """Begin the first generation. All ``ranks`` (global) call it."""
        with store_needed():
            if self._life is not None:
                self._store.set(f"founder/{self._rank}", self._life.name)
                keys = [f"founder/{rank}" for rank in ranks]
                wait_for_keys(self._store, keys, self._timeout)
                founders = zip(ranks, keys, strict=True)
                lives = {rank: self._store.get(key).decode() for rank, key in founders}
                self._store.compare_set(_members_key(0), "", Decision(lives, {}, 0, []).text())
            self.lives = self._await_decision(0).members

    def requests(self) -> int:
        """How many have asked to join; 0 if the store does not answer, or another one looks."""
        if self._life is None:
            return 0
        try:
            return int(self._store.add("requests", 0))
        except dist.DistError:
            return 0

    def unsettled(self, requests: int) -> bool:
        return requests > self._settled_requests

    def gather(self, least: int, grace: float) -> tuple[bool, bool]:
        """Wait for the members before a round, and decide which of them are late. All call it.

        Once ``least`` are there they wait twice as long as they took to come, at least a second and
        at most ``grace`` seconds. The member that came first decides. Returns whether the members
        change before the round, and whether this one is late.
        """
        self._gathered += 1
        key = f"generation{self.generation}/round{self._gathered}"
        with store_needed():
            if self._life is not None:
                self._store.set(f"{key}/here/{self._rank}", "")
                first = int(self._store.compare_set(f"{key}/first", "", str(self._rank)))
                self._open(key, first, least, grace)
            wait_for_keys(self._store, [f"{key}/late"], 3 * self._timeout)
            late = stored_value(self._store, f"{key}/late", lambda v: [int(rank) for rank in v])
            self._late = [rank for rank in late if rank != _SOMEONE_JOINS]
            return bool(late), self._rank in self._late

    def _open(self, key: str, first: int, least: int, grace: float) -> None:
        """Have it be decided who is late for a round, perhaps by this process."""
        pulse, began, complete = Pulse(self._store), time.monotonic(), 0.0
        while not self._store.check([f"{key}/late"]):
            now = time.monotonic() - began
            here = self._here(key)
            missing = {r: life for r, life in self.lives.items() if r not in here}
            waited_for = [rank for rank, life in missing.items() if not pulse.silent(life)]
            decides = first == self._rank or pulse.silent(self.lives[first])
            if len(here) < least:
                complete = now
            over = now - complete > min(grace, max(1.0, 2 * complete))
            if now > self._timeout.total_seconds() or (decides and (over or not waited_for)):
                joins = [_SOMEONE_JOINS] if self.unsettled(self.requests()) else []
                late = json.dumps([*missing, *joins])
                self._store.compare_set(f"{key}/late", "", late)
            else:
                time.sleep(_PAUSE)

    def change(self, report: Report, least: int) -> Change:
        """Agree on the next generation: Note [Generations]. All members call it.

        ``report``: for the others. ``least``: members without which nobody goes on.
        """
        with store_needed():
            number = self.generation + 1
            if self._life is not None:
                here = f"generation{number}/here"
                self._store.set(f"{here}/{self._rank}", json.dumps(report))
                self._decide(number)
            decision = self._await_decision(number)
            members, called = decision.members, self._called
            if members.get(self._rank) != self.lives.get(self._rank):
                raise _C.BaguaError(
                    f"{called} {self._rank} was taken for dead by {called}(s) {_listed(members)}, "
                    f"which have gone on without it since generation {number}. Start it again to "
                    "have it come back."
                )
            lost = sorted(rank for rank in self.lives if rank not in decision.stay())
            if len(members) < least:
                raise _C.BaguaError(
                    f"{called}(s) {_listed(lost)} of {len(self.lives)} were lost, and the "
                    f"{len(members)} left are fewer than quorum={least}. Restart the job "
                    "from its last checkpoint, or allow fewer ranks."
                )
            for request in decision.joined:
                self._store.set(f"request/{request}/answer", str(number))
            return self._enter(number, decision, lost)

    def _enter(self, number: int, decision: Decision, lost: list[int]) -> Change:
        here = f"generation{number}/here"
        reports = {
            rank: stored_value(
                self._store, f"{here}/{rank}", lambda v: {str(k): int(n) for k, n in v.items()}
            )
            for rank in decision.stay()
        }
        self.generation, self.lives = number, decision.members
        self._settled_requests = decision.requests
        self._late, self._gathered = [], 0
        returned = sorted(decision.returned)
        joined = sorted(rank for rank in decision.joined.values() if rank not in returned)
        return Change(number, sorted(decision.members), joined, returned, lost, reports)

    def _await_decision(self, number: int) -> Decision:
        wait_for_keys(self._store, [_members_key(number)], 3 * self._timeout)
        return _decision(self._store, number)

    def _decide(self, number: int) -> None:
        """Have the decision of generation ``number`` be made, perhaps by this process."""
        pulse, key = Pulse(self._store), _members_key(number)
        deadline = time.monotonic() + 2 * self._timeout.total_seconds()
        while not self._store.check([key]):
            here = self._here(f"generation{number}")
            expected = {r: life for r, life in self.lives.items() if r not in self._late}
            missing = {rank: life for rank, life in expected.items() if rank not in here}
            # All are asked: each look counts the time since the last change.
            waited_for = [rank for rank, life in missing.items() if not pulse.silent(life)]
            requests = self.requests()
            joining, unknown = self._joining(pulse, here, requests)
            if time.monotonic() > deadline or not (waited_for or unknown):
                members = {rank: self.lives[rank] for rank in here}
                members |= {request.rank: request.life for request in joining.values()}
                joined = {number: request.rank for number, request in joining.items()}
                returned = [request.rank for request in joining.values() if request.returns]
                proposal = Decision(members, joined, requests, returned)
                self._store.compare_set(key, "", proposal.text())
            else:
                time.sleep(_PAUSE)

    def _here(self, key: str) -> list[int]:
        return [rank for rank in self.lives if self._store.check([f"{key}/here/{rank}"])]

    def _joining(
        self, pulse: Pulse, here: list[int], requests: int
    ) -> tuple[dict[int, _Request], bool]:
        """The requests of living processes that wait to join, by number, and whether it is not
        known yet of another one whether it lives."""
        joining: dict[int, _Request] = {}
        unknown = False
        for number in range(1, requests + 1):
            keys = [f"request/{number}", f"request/{number}/answer"]
            if not self._store.check(keys[:1]) or self._store.check(keys[1:]):
                continue
            request = stored_value(
                self._store, keys[0], lambda v: _Request(int(v[0]), str(v[1]), bool(v[2]))
            )
            if request.rank in here:  # a second process of a rank that lives
                continue
            if pulse.silent(request.life):
                self._store.set(keys[1], "0")
            elif pulse.beats(request.life):
                joining = {n: other for n, other in joining.items() if other.rank != request.rank}
                joining[number] = request
            else:
                unknown = True
        return joining, unknown

    def ask(self, *, returns: bool = False) -> int:
        """Ask to belong to the newest generation; the number of the request. 0: another one asks.

        ``returns``: this process was late, and keeps its state.
        """
        if self._life is None:
            return 0
        with store_needed():
            request = int(self._store.add("requests", 1))
            text = json.dumps([self._rank, self._life.name, returns])
            self._store.set(f"request/{request}", text)
            return request

    def join(self, request: int) -> Change:
        """Wait for the generation that answers a ``request``, or raise: nobody is left."""
        with store_needed():
            pulse, answer = Pulse(self._store), f"request/{request}/answer"
            while not self._store.check([answer]):
                number, lives = newest_generation(self._store)
                silent = [pulse.silent(life) for life in lives.values()]
                if all(silent):
                    raise _C.BaguaError(
                        f"{self._called} {self._rank} came back, and no member of generation "
                        f"{number}, {self._called}(s) {_listed(lives)}, is alive any more. If they "
                        "have not ended with the training, start all again."
                    )
                time.sleep(_PAUSE)
            number = stored_number(self._store, answer, 2**31)
            if number == 0:
                raise _C.BaguaError(
                    f"{self._called} {self._rank} came back, and its heartbeats did not reach the "
                    "others while they decided. Start it again."
                )
            return self._enter(number, _decision(self._store, number), [])


def newest_generation(store: c10d.Store) -> tuple[int, dict[int, str]]:
    """(number, lives by global rank) of the newest generation; (-1, {}): there is none."""
    number = -1
    while store.check([_members_key(number + 1)]):
        number += 1
    if number < 0:
        return number, {}
    return number, _decision(store, number).members


def _members_key(generation: int) -> str:
    return f"generation{generation}/members"


def _decision(store: c10d.Store, generation: int) -> Decision:
    return stored_value(
        store,
        _members_key(generation),
        lambda value: Decision(
            {int(rank): str(life) for rank, life in value["members"].items()},
            {int(request): int(rank) for request, rank in value["joined"].items()},
            int(value["requests"]),
            [int(rank) for rank in value["returned"]],
        ),
    )


class _Request(NamedTuple):
    rank: int
    life: str
    returns: bool


def _listed(ranks: Mapping[int, Any] | list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def announce(store: c10d.Store, incarnation: str) -> None:
    """The job's store tells processes that come later which start of the job is at work."""
    store.set(_KEY, incarnation)


def elastic_store(group_store: c10d.Store) -> c10d.Store:
    return c10d.PrefixStore("elastic", group_store)


def job_at_work(store: c10d.Store, group: str) -> str | None:
    """The incarnation whose ranks train, one of which this process was; None: all begin.

    Takes some seconds where there was one and its processes are dead. ``group``: its elastic group.
    """
    if not store.check([_KEY]):
        return None
    incarnation = str(store.get(_KEY).decode())
    its_store = elastic_store(c10d.PrefixStore(f"bagua/{incarnation}/{group}", store))
    _, lives = newest_generation(its_store)
    pulse = Pulse(its_store)
    while not all([pulse.silent(life) for life in lives.values()]):
        if any(pulse.beats(life) for life in lives.values()):
            return incarnation
        time.sleep(_PAUSE)
    return None
