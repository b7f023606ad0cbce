"""The members of an elastic group: who lives, who belongs, and how a process comes back.

They agree through the job's store.

Note [Generations]
A generation is a set of members with separate connections, whose keys have a prefix of their
own. The next one is decided by a single ``compare_set`` on one key of the store, so there is never
more than one, however the network is cut: the store is the referee.

1. Each member of a generation that has failed, or has seen a request to join, writes that it is
   here, with a report of its state. After a failure they find out which of them reach each other:
   Note [One bad link].
2. The one that came first waits until each other member is here too, or has been silent for some
   seconds, or twice the group's timeout is over: the first is for a rank that waits in a
   collective. It is near the store as a rule. The others read its decision, a round trip a look;
   once it is silent itself, they do as it does.
3. It proposes those that are here, less one end of each bad link, and the processes that wait to
   join and are alive. The first proposal is the decision.
4. A member that is not in it raises. So do all if fewer are left than they must be.

A member of several processes, an island, has one that does this, its leader. The others read the
decision: all of them have agreed that there is to be one.

Note [Keys of an elastic group]
None grows with rounds, generations or processes that have come back:

- ``members``: the newest decision, which takes the place of the one before.
- ``asking``: lines of those that wait to join, one a rank. Who decides takes answered ones away.
- ``generation<g>/here``: lines of the members that have come to the change to generation g;
  ``.../links``: whether each of them reaches another one.
- ``generation<g>/round<n>/here``, ``.../late``: of a round of generation g with a grace. Who
  decides round n deletes round n - 2, whose decision all have read that were in n - 1.
- ``life/<name>``: heartbeats of a process. Who decides deletes those of processes that neither
  belong nor ask, and what there is of generations before the last one.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua import _C
from bagua._core.group.grace import Grace
from bagua._core.group.rendezvous import (
    Pause,
    append,
    forget,
    is_name,
    keys_in,
    name_in,
    read,
    stored_name,
    value_in,
    whole,
)

if TYPE_CHECKING:
    from bagua._core.group.links import Links, Place

_PAUSES = 0.02, 0.5  # seconds between two looks at the store before a round: the first, the longest
#: The same while members change: a look is two requests on average, four a second in a long wait.
_OF_CHANGES = 0.02, 0.5
_SOMEONE_JOINS = -1  # among the late ones of a round
_KEY = "bagua/elastic"  # the incarnation that began last
_MEMBERS, _ASKING = "members", "asking"
_LEFT = "left"  # in place of a heartbeat
_MOST_BYTES = 16 * 1024**2  # of one key: a thousand members have reports in it
_MOST_RANK = 2**31
_REQUESTS_FOR_MANY = 3  # keys: one to know that they are there, and torch's two to read them
_MOST_ATTEMPTS = 16  # to take lines away that others add to
#: A process whose heartbeat has not changed for so long is dead, stopped or cut off. There are two
#: heartbeats a second, from a thread that does not need the interpreter.
SECONDS_OF_SILENCE = 5.0

#: Counters of a member.
Report = dict[str, int]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Change:
    """A decision, in global ranks.

    Attributes:
        joined: members that are new.
        returned: members that were late for a round.
        reports: of the members that stay.
        apart: pairs of members before that did not reach each other.
        left: those of the lost ones that have said so.
    """

    generation: int
    members: list[int]
    joined: list[int]
    returned: list[int]
    lost: list[int]
    reports: dict[int, Report]
    apart: list[tuple[int, int]]
    left: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Decision:
    """A generation, as the store has it; number -1: there is none yet.

    Attributes:
        members: names of their lives, by global rank.
        reports: of the members that stay, by global rank; of the first generation there are none.
        returned: new ones that were late, and keep their state.
        apart: pairs of members before that did not reach each other.
        unanswered: lives of those that asked to join, and were not taken in.
        left: members before that have said that they leave.
    """

    generation: int = -1
    members: dict[int, str] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)
    apart: list[tuple[int, int]] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def joined(self) -> list[int]:
        return [] if self.generation == 0 else sorted({*self.members} - {*self.reports})

    def text(self) -> str:
        return json.dumps(asdict(self))


class Life:
    """Heartbeats of this process, until the object is deleted; its name is a random number."""

    def __init__(self, store: c10d.Store) -> None:
        self.name = _life_name(secrets.randbits(56))
        self._store = store
        self._board: _C.FailureBoard | None = _C.FailureBoard(
            c10d.PrefixStore(f"life/{self.name}", store), 0, 1
        )
        self._board.beat(0, "alive")

    def end(self) -> None:
        """Tell the others that this process leaves: they do not wait until it is silent."""
        self._board = None  # its thread has ended then
        self._store.set(_beat_key(self.name), _LEFT)


def _beat_key(life: str) -> str:
    return f"life/{life}/beat/0"


def _life_name(number: int) -> str:
    return f"{number:014x}"


class _Seen(NamedTuple):
    beat: bytes
    at: float


class Pulse:
    """Watches the heartbeats of other processes: :meth:`look` is called again and again."""

    def __init__(self, store: c10d.Store) -> None:
        self._store = store
        self._reads_many: bool = store.has_extended_api()  # type: ignore[attr-defined]
        self._first: dict[str, bytes] = {}
        self._last: dict[str, _Seen] = {}
        self._looked = 0.0

    def look(self, names: Iterable[str]) -> None:
        """Read the heartbeats of those :class:`Life`. Three requests, where all have beaten."""
        names = [*dict.fromkeys(names)]
        self._looked = now = time.monotonic()
        for name, beat in zip(names, self._beats(names), strict=True):
            self._first.setdefault(name, beat)
            last = self._last.get(name)
            if last is None or last.beat != beat:
                self._last[name] = _Seen(beat, now)

    def silent(self, name: str) -> bool:
        """Whether the heartbeat had not changed for some seconds at the last look, or has ended."""
        return self.left(name) or self._looked - self._last[name].at > SECONDS_OF_SILENCE

    def left(self, name: str) -> bool:
        """Whether the process had said that it leaves."""
        return self._last[name].beat == _LEFT.encode()

    def beats(self, name: str) -> bool:
        """Whether the heartbeat had changed between the first look and the last one."""
        beat = self._last[name].beat
        return beat not in (b"", self._first[name])

    def _beats(self, names: Sequence[str]) -> list[bytes]:
        keys = [*map(_beat_key, names)]
        if self._reads_many and len(keys) > _REQUESTS_FOR_MANY and self._store.check(keys):
            return [bytes(beat) for beat in self._store.multi_get(keys)]
        return [read(self._store, key) for key in keys]


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

    Keys: Note [Keys of an elastic group]. Requests to the store do not depend on the number of
    members: at most ten for a round with a grace, and four for each look while one waits.

    Args:
        store: of the group, for all of its generations.
        rank: the global one of this process, or the number of its island.
        timeout: after which a member that lives and does not come is given up.
        leads: False: another process of this member writes and decides.
        called: what members are called in errors.
        counts: counters that each report has.

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
        counts: Collection[str] = (),
    ) -> None:
        self.owner: Callable[[], object | None] = lambda: None
        self.generation = 0
        self.lives: dict[int, str] = {}
        self._store = store
        self._rank = rank
        self._life = Life(store) if leads else None
        self._timeout = timeout
        self._called = called
        self._counts = counts
        self._decision = Decision()  # the last one that this member has entered
        self._met_founders = False
        self._gathered = 0  # rounds of this generation
        self._late: list[int] = []  # that the next generation goes on without

    def found(self, ranks: list[int]) -> None:
        """Begin the first generation. All ``ranks`` (global) call it."""
        with store_needed():
            if self._life is not None:
                place, timeout = ranks.index(self._rank), self._timeout.total_seconds()
                founders = _C.Gathering(
                    self._store, "founders", place, len(ranks), timeout, self._met_founders
                )
                self._met_founders = True
                founders.bring(self._life.name)
                names = [name_in(name, "founders") for name in founders.texts()]
                decision = self._propose(Decision(0, dict(zip(ranks, names, strict=True))))
            else:
                decision = self._await_decision(0)
            self._enter(decision)

    def leave(self) -> None:
        """Tell the others that this member leaves, after a round."""
        if self._life is not None:
            with store_needed():
                self._life.end()

    def requests(self) -> int:
        """How many ask to join that no decision has seen; 0 if the store does not answer, or
        another process looks."""
        if self._life is None:
            return 0
        try:
            known = {*self.lives.values(), *self._decision.unanswered}
            return sum(request.life not in known for request in self._asking())
        except dist.DistError:
            return 0

    def gather(self, least: int, grace: float) -> tuple[bool, bool]:
        """Wait for the members before a round, and decide which of them are late. All call it.

        Once ``least`` are there they wait twice as long as they took to come, at least a second and
        at most ``grace`` seconds. The member that came first decides, or the last one if none is
        missing. Returns whether the members change before the round, and whether this one is late.
        """
        self._gathered += 1
        key = f"generation{self.generation}/round{self._gathered}"
        with store_needed():
            late = self._await_late(key) if self._life is None else self._open(key, least, grace)
            self._late = [rank for rank in late if rank != _SOMEONE_JOINS]
            return bool(late), self._rank in self._late

    def _open(self, key: str, least: int, grace: float) -> list[int]:
        """Who is late for a round, which is decided, perhaps by this process."""
        append(self._store, f"{key}/here", f"{json.dumps([self._rank])}\n")
        pulse, pause = Pulse(self._store), Pause(*_PAUSES)
        waits = Grace(least, grace)
        while (late := self._found_late(key)) is None:
            here = self._here(key, lambda line: None)
            missing = {rank: life for rank, life in self.lives.items() if rank not in here}
            first = self.lives[next(iter(here), self._rank)]
            pulse.look([*missing.values(), first] if missing else [])
            waited_for = [rank for rank, life in missing.items() if not pulse.silent(life)]
            decides = not missing or first == self.lives[self._rank] or pulse.silent(first)
            over = waits.over(len(here), len(waited_for))
            if waits.waited > self._timeout.total_seconds() or (decides and over):
                joins = [_SOMEONE_JOINS] if self.requests() else []
                self._store.compare_set(f"{key}/late", "", json.dumps([*missing, *joins]))
                self._forget_round(self._gathered - 2)
            else:
                pause.take()
        return late

    def _await_late(self, key: str) -> list[int]:
        deadline, pause = time.monotonic() + 3 * self._timeout.total_seconds(), Pause(*_PAUSES)
        while (late := self._found_late(key)) is None:
            if time.monotonic() > deadline:
                raise _C.BaguaTimeoutError(f"nobody has decided who is late for '{key}'")
            pause.take()
        return late

    def _found_late(self, key: str) -> list[int] | None:
        """Who is late for a round; None: it is not decided yet."""
        if self._store.check([f"{key}/late"]):
            text = read(self._store, f"{key}/late")
            return _word(text, f"{key}/late", lambda ranks: [_number(r, -1) for r in ranks])
        # The others may have changed without this member since, and deleted that decision.
        return [self._rank] if self._newest().generation > self.generation else None

    def _forget_round(self, number: int) -> None:
        key = f"generation{self.generation}/round{number}"
        if number > 0:
            forget(self._store, [f"{key}/here", f"{key}/late"])

    def change(self, report: Report, least: int, *, failed: bool = False) -> Change:
        """Agree on the next generation: Note [Generations]. All members call it.

        ``report``: for the others. ``least``: members without which nobody goes on. ``failed``: a
        round has, so that links are to be looked at.
        """
        with store_needed():
            number = self.generation + 1
            if self._life is None:
                decision = self._await_decision(number)
            else:
                decision = self._agree_on_next(report, failed)
            members, called = decision.members, self._called
            if members.get(self._rank) != self.lives.get(self._rank):
                if any(self._rank in link for link in decision.apart):
                    raise _C.BaguaError(
                        f"{called} {self._rank} is left out, and {called}(s) {_listed(members)} go "
                        f"on: {links_in_words(called, decision.apart)}. Mend the network between "
                        "them, then start it again to have it come back."
                    )
                raise _C.BaguaError(
                    f"{called} {self._rank} was taken for dead by {called}(s) {_listed(members)}, "
                    f"which are in generation {decision.generation} without it. Start it again to "
                    "have it come back."
                )
            lost = sorted({*self.lives} - {*decision.reports})
            if len(members) < least:
                apart = f" ({links_in_words(called, decision.apart)})" if decision.apart else ""
                raise _C.BaguaError(
                    f"{called}(s) {_listed(lost)} of {len(self.lives)} were lost{apart}, and the "
                    f"{len(members)} left are fewer than quorum={least}. Restart the job "
                    "from its last checkpoint, or allow fewer ranks."
                )
            return self._enter(decision, lost)

    def _enter(self, decision: Decision, lost: Sequence[int] = ()) -> Change:
        self.generation, self.lives = decision.generation, decision.members
        self._decision = decision
        self._late, self._gathered = [], 0
        returned = sorted(decision.returned)
        return Change(
            decision.generation,
            sorted(decision.members),
            [rank for rank in decision.joined() if rank not in returned],
            returned,
            [*lost],
            decision.reports,
            decision.apart,
            decision.left,
        )

    def _newest(self) -> Decision:
        return newest(self._store, self._decision.generation, self._counts)

    def _await_decision(self, number: int) -> Decision:
        deadline, pause = (
            time.monotonic() + 3 * self._timeout.total_seconds(),
            Pause(*_OF_CHANGES),
        )
        while (decision := self._newest()).generation < number:
            if time.monotonic() > deadline:
                raise _C.BaguaTimeoutError(
                    f"the {self._called}s have not decided on their generation {number} within "
                    f"{3 * self._timeout.total_seconds():g} s: those that decide did not come"
                )
            pause.take()
        return decision

    def _agree_on_next(self, report: Report, failed: bool) -> Decision:
        """The next generation, which is decided, perhaps by this process."""
        key, own = f"generation{self.generation + 1}", self.lives[self._rank]
        deadline = time.monotonic() + 2 * self._timeout.total_seconds()
        pulse, pause, decides = Pulse(self._store), Pause(*_OF_CHANGES), False
        with _links(failed) as links:
            place = None if links is None else links.place
            append(self._store, f"{key}/here", f"{json.dumps([self._rank, report, place])}\n")
            for look in itertools.count():
                if decides or look % 2 == 0:
                    here = self._here(key, lambda line: _present(line, report))
                    if links is not None:
                        self._tell(f"{key}/links", here, links)
                    first = self.lives[next(iter(here), self._rank)]
                    over = time.monotonic() > deadline
                    decides = over or first == own
                    if not decides and look > 0:  # the decision may be there already
                        pulse.look([first])
                        decides = pulse.silent(first)
                decision = self._decide(key, here, pulse, over) if decides else self._newest()
                if decision is not None and decision.generation > self.generation:
                    return decision
                pause.take()
        raise AssertionError

    def _tell(self, key: str, here: Mapping[int, _Present], links: Links) -> None:
        """Ask the members that have come since, and write what others have answered."""
        others = {rank: place for rank, place in _places(here).items() if rank != self._rank}
        lines = [json.dumps([self._rank, *answer]) for answer in links.ask(others).items()]
        if lines:
            append(self._store, key, "".join(f"{line}\n" for line in lines))

    def _decide(
        self, key: str, here: Mapping[int, _Present], pulse: Pulse, over: bool
    ) -> Decision | None:
        """Propose the next generation, or None: it is too early. ``over``: to wait."""
        absent = {rank: life for rank, life in self.lives.items() if rank not in here}
        missing = [life for rank, life in absent.items() if rank not in self._late]
        if missing:  # or the others have gone on without this one
            newest = self._newest()
            if newest.generation > self.generation:
                return newest
        asking = [request for request in self._asking() if request.rank not in here]
        told_of = [self.lives[rank] for rank in _places(here)]
        pulse.look([*absent.values(), *told_of, *(request.life for request in asking)])
        joining = [request for request in asking if pulse.beats(request.life)]
        dead = {request.life for request in asking if pulse.silent(request.life)}
        waits = len(asking) > len(joining) + len(dead)
        waits = waits or not all(pulse.silent(life) for life in missing)
        apart = None if waits else self._apart(f"{key}/links", here, pulse)
        if apart is None and not over:
            return None
        reports = _going_on(here, apart or [])
        members = {rank: self.lives[rank] for rank in reports}
        members |= {request.rank: request.life for request in joining}
        proposal = Decision(
            self.generation + 1,
            members,
            reports,
            [request.rank for request in joining if request.returns],
            apart or [],
            sorted({one.life for one in asking} - {*members.values(), *dead}),
            [rank for rank, life in absent.items() if pulse.left(life)],
        )
        return self._propose(proposal, dead)

    def _apart(
        self, key: str, here: Mapping[int, _Present], pulse: Pulse
    ) -> list[tuple[int, int]] | None:
        """The pairs that do not reach each other; None: not all have told it yet."""
        places = [*_places(here)]
        if not places:
            return []
        told = self._told(key)
        for rank, other in itertools.permutations(places, 2):
            if (rank, other) not in told and not pulse.silent(self.lives[rank]):
                return None
        return [
            (rank, other)
            for rank, other in itertools.combinations(sorted(places), 2)
            if told.get((rank, other)) is told.get((other, rank)) is False
        ]

    def _told(self, key: str) -> dict[tuple[int, int], bool]:
        """Whether the first of two members reaches the second."""
        lines = _lines(
            read(self._store, key),
            key,
            lambda line: ((_number(line[0]), _number(line[1])), _flag(line[2])),
        )
        return dict(lines)

    def _propose(self, proposal: Decision, dead: Collection[str] = ()) -> Decision:
        """The decision: this one, unless there is one already. ``dead``: some that have asked."""
        text = proposal.text().encode()
        before = self._decision.text() if proposal.generation > 0 else ""
        found = bytes(self._store.compare_set(_MEMBERS, before, text.decode()))
        if found != text:
            return decision_in(found, proposal.generation, self._counts)
        if proposal.generation > 0:
            answered = {*proposal.members.values(), *dead}
            asking = self._take_away(lambda request: request.life in answered)
            lives = {*proposal.members.values(), *self.lives.values(), *asking}
            forget_old(self._store, proposal.generation, lives)
        return proposal

    def _here(self, key: str, word: Callable[[Any], Value]) -> dict[int, Value]:
        """The members that have come to a round or a change, in that order, and their words."""
        key = f"{key}/here"
        lines = _lines(read(self._store, key), key, lambda line: (_number(line[0]), word(line)))
        return {rank: found for rank, found in lines if rank in self.lives}

    def _asking(self) -> list[_Request]:
        """The last request of each rank."""
        return _requests_in(read(self._store, _ASKING))

    def _take_away(self, answered: Callable[[_Request], bool]) -> list[str]:
        """Take requests from the list, to which others may add at the same time.

        Returns the lives of those that it has found.
        """
        for _ in range(_MOST_ATTEMPTS):
            before = read(self._store, _ASKING)
            asking = _requests_in(before)
            kept = "".join(one.line() for one in asking if not answered(one)).encode()
            if before in (
                kept,
                bytes(self._store.compare_set(_ASKING, before.decode(), kept.decode())),
            ):
                break
        return [one.life for one in asking]

    def ask(self, *, returns: bool = False) -> int:
        """Ask to belong to the newest generation; a number for the request. 0: another one asks.

        ``returns``: this process was late, and keeps its state.
        """
        if self._life is None:
            return 0
        with store_needed():
            self._take_away(lambda request: request.rank == self._rank)
            append(self._store, _ASKING, _Request(self._rank, self._life.name, returns).line())
            return int(self._life.name, 16)

    def join(self, request: int) -> Change:
        """Wait for the generation that answers a ``request``, or raise: nobody is left."""
        life, pulse, pause = _life_name(request), Pulse(self._store), Pause(*_OF_CHANGES)
        asks = True
        with store_needed():
            for look in itertools.count():
                decision = self._newest()
                answers = decision.generation > self.generation  # it may have come back in this one
                if answers and decision.members.get(self._rank) == life:
                    return self._enter(decision)
                if not asks:  # before that decision was read, which comes before a line goes
                    raise _C.BaguaError(
                        f"{self._called} {self._rank} came back, and its heartbeats did not reach "
                        "the others while they decided, or another process asks in its place. "
                        "Start it again."
                    )
                if look % 2 == 0:
                    asks = any(one.life == life for one in self._asking())
                    pulse.look(decision.members.values())
                    if all(pulse.silent(member) for member in decision.members.values()):
                        raise _C.BaguaError(
                            f"{self._called} {self._rank} came back, and no member of generation "
                            f"{decision.generation}, {self._called}(s) "
                            f"{_listed(decision.members)}, is alive any more. If they have not "
                            "ended with the training, start all again."
                        )
                pause.take()
        raise AssertionError


class _Request(NamedTuple):
    rank: int
    life: str
    returns: bool

    def line(self) -> str:
        return f"{json.dumps(self)}\n"


def _requests_in(value: bytes) -> list[_Request]:
    """The last request of each rank."""
    lines = _lines(
        value, _ASKING, lambda line: _Request(_number(line[0]), _name(line[1]), _flag(line[2]))
    )
    return [*{request.rank: request for request in lines}.values()]


def newest(store: c10d.Store, known: int = -1, counts: Collection[str] = ()) -> Decision:
    """The generation that was decided last; there have been those up to ``known``.

    ``counts``: counters that each of its reports has.
    """
    text = read(store, _MEMBERS)
    return decision_in(text, known, counts) if text or known >= 0 else Decision()


def decision_in(text: bytes, known: int, counts: Collection[str]) -> Decision:
    """The decision that ``text`` is, as :func:`newest` returns it."""
    return _word(text, _MEMBERS, lambda value: _decision(value, text, known, counts))


def forget_old(store: c10d.Store, generation: int, lives: Collection[str]) -> None:
    """Delete keys of generations before the one before ``generation``, and of other ``lives``."""
    forget(store, [key for key in keys_in(store) if _is_old(key, generation, lives)])


def _is_old(key: str, generation: int, lives: Collection[str]) -> bool:
    if of_generation := re.match(r"generation(\d{1,9})/", key):
        return int(of_generation[1]) < generation - 1
    of_life = re.match(r"life/([^/]+)/", key)
    return of_life is not None and of_life[1] not in lives


def _number(value: Any, least: int = 0) -> int:
    return whole(value, _MOST_RANK, least)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(value)
    return value


def _name(value: Any) -> str:
    if not is_name(value.encode()):
        raise ValueError(value)
    return str(value)


class _Present(NamedTuple):
    report: Report
    place: Place | None


def _present(line: Any, like: Report) -> _Present:
    """A member that has come to a change, with a report that counts as ``like`` does."""
    from bagua._core.group.links import Place

    if line[1].keys() != like.keys():
        raise ValueError(line[1])
    return _Present(_report(line[1]), None if line[2] is None else Place.of(*line[2]))


def _going_on(here: Mapping[int, _Present], apart: list[tuple[int, int]]) -> dict[int, Report]:
    """Reports of the members that are here, without one end of each bad link."""
    gone: list[int] = []
    if apart:
        from bagua._core.group.links import left_out

        gone = left_out(apart)
    return {rank: report for rank, (report, _) in here.items() if rank not in gone}


def _places(here: Mapping[int, _Present]) -> dict[int, Place]:
    """Where the members listen that look at links."""
    return {rank: place for rank, (_, place) in here.items() if place is not None}


@contextmanager
def _links(opened: bool) -> Iterator[Links | None]:
    """Links to look at, where they are and there is an address."""
    links = None
    if opened:
        from bagua._core.group.links import Links

        with suppress(OSError):
            links = Links()
    try:
        yield links
    finally:
        if links is not None:
            links.close()


def links_in_words(called: str, apart: Iterable[tuple[int, int]]) -> str:
    links = " and ".join(f"{called}s {one} and {other}" for one, other in apart)
    return f"{links} do not reach each other"


def _report(value: Any) -> Report:
    for name, count in value.items():
        if not is_name(name.replace("_", "").encode()) or type(count) is not int or count < 0:
            raise ValueError(value)
    return dict(value)


def _decision(value: Any, text: bytes, known: int, counts: Collection[str]) -> Decision:
    found = Decision(
        _number(value["generation"], max(known, 0)),
        {_number(int(rank)): _name(life) for rank, life in value["members"].items()},
        {_number(int(rank)): _report(report) for rank, report in value["reports"].items()},
        [_number(rank) for rank in value["returned"]],
        [(_number(one), _number(other)) for one, other in value["apart"]],
        [_name(life) for life in value["unanswered"]],
        [_number(rank) for rank in value["left"]],
    )
    right = {*found.reports} <= {*found.members} and (found.generation == 0 or found.reports)
    if not right or any(not report.keys() >= {*counts} for report in found.reports.values()):
        raise ValueError(value)
    if found.text().encode() != text:
        raise ValueError(value)
    return found


def _lines(value: bytes, key: str, read_line: Callable[[Any], Value]) -> list[Value]:
    """What ``read_line`` makes of each line of JSON that processes have appended to ``key``."""
    return _word(
        b"[%s]" % b",".join(value.splitlines()), key, lambda v: [read_line(line) for line in v]
    )


def _word(value: bytes, key: str, read: Callable[[Any], Value]) -> Value:
    return value_in(value, key, read, _MOST_BYTES)


def _listed(ranks: Iterable[int]) -> str:
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
    incarnation = stored_name(store, _KEY)
    its_store = elastic_store(c10d.PrefixStore(f"bagua/{incarnation}/{group}", store))
    lives, pulse, pause = (
        newest(its_store).members.values(),
        Pulse(its_store),
        Pause(*_OF_CHANGES),
    )
    pulse.look(lives)
    while not all(pulse.silent(life) for life in lives):
        if any(pulse.beats(life) for life in lives):
            return incarnation
        pause.take()
        pulse.look(lives)
    return None
