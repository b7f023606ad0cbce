"""Outer rounds that outlive ranks.

Note [Elastic rounds]
A round changes anchor and momentum only when this rank knows that all others have the mean: they
exchange a byte behind the last bucket of a lane (:meth:`ElasticRanks.confirm`). What fails before
is noted and changes nothing: the weights stay, and the next pseudo-gradient, which is cumulative,
carries what the lost round would have.

1. In the next training forward the ranks agree on who is left (Note [Generations]), connect anew
   and build new buckets. Each goes on with its own anchor and momentum.
2. A failure may strike some ranks after others have confirmed. Those have made one round more than
   the rest, which gets anchor and momentum from the lowest of them and uses the result of that
   round.
3. Ranks that join get the model, buffers and the state of the optimizers from the same rank, then
   anchor, momentum and counters; their weights begin as the anchor.
4. All compare their anchors before they go on.

Note [Late ranks]
With a grace a round begins with an agreement in the store on who has come in time
(:meth:`Membership.gather`). If not all have, or others wait to join, the ranks that have change
before the round, which is made in the next training forward. A rank that was late learns it when
it comes. It asks to join and keeps its weights, optimizers and residuals; it gets anchors, momentum
and counters, and its weights move with the anchors: what it has trained is in the next
pseudo-gradient, divided where it is of more than an interval, as of a fragment whose turn has
passed.

Note [Ranks that leave]
A rank that is told to leave says so where a round is confirmed, and ends when all have that round:
its steps are in it. Its last heartbeat says that it has left, and the others change before their
next round, as where one joins.

Note [Islands of several ranks]
Each rank of an island has a separate group with those of its rank in other islands, and between
its collectives it has some with the ranks of its island. So all ranks of an island must fail in the
same rounds: what fails between islands is held until :meth:`ElasticRanks.receive`, where the ranks
of the island agree whether all have the mean. A rank that has it while another one has not reports
a failure to its group. The first ranks of the islands decide on the members, for all groups.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d as c10d

from bagua import _C
from bagua._core.group.membership import (
    Change,
    Membership,
    Report,
    elastic_store,
    forget_old,
    links_in_words,
    store_needed,
)
from bagua._core.group.process_group import BaguaProcessGroup, close_at_exit
from bagua._core.group.warn import warn_here
from bagua._outer import leaving
from bagua._outer.late import LateWeights
from bagua._outer.loop import broadcast_fragments
from bagua._outer.strategies import Elastic, FixedRanks, RankWeights

if TYPE_CHECKING:
    import torch

    from bagua._core.group.connections import Connections
    from bagua._outer.loop import OuterLoop, OuterState, Schedule

#: Of the seconds to leave in, after which a rank leaves without a round.
_OF_A_NOTICE = 0.85
#: Changes in a row that may fail before the training does.
_MOST_ATTEMPTS = 5
#: Those of a report that a member goes on with.
_COUNTERS = "steps", "outer_rounds", "communications", "trained", "postponed"

_log = logging.getLogger("bagua")


@dataclass(frozen=True)
class StateTransfer:
    """The rank that gives its state, and those that take it, in global ranks."""

    source: int  # the lowest rank that has made most rounds
    behind: list[int]  # that have made one less, or more where they were late
    joined: list[int]  # new ones
    counters: Report  # those of ``source``

    @staticmethod
    def after(change: Change) -> StateTransfer:
        rounds = {rank: report["communications"] for rank, report in change.reports.items()}
        most = max(rounds.values())
        source = min(rank for rank in rounds if rounds[rank] == most)
        behind = sorted([*change.returned, *(r for r in rounds if rounds[r] < most)])
        return StateTransfer(source, behind, change.joined, change.reports[source])


class ElasticRanks(FixedRanks):
    """The ranks of an elastic algorithm's group, which changes in place: fewer after a loss.

    In a process that comes back this joins it.
    """

    def __init__(self, group: BaguaProcessGroup, elastic: Elastic) -> None:
        self._group = group
        self._elastic = elastic
        self._newcomers = False
        self._late = False  # this rank, until it has come back
        self._told_late: set[int] = set()
        # Until the plan after a change is complete.
        self._transfer: StateTransfer | None = None
        self._before: OuterLoop | None = None
        self._missed: int | None = None  # the fragment whose round was under way
        self._held: _C.BaguaError | None = None
        self._engine: _C.Engine | None = None  # of the plan after a change, until all have one
        self._sigterm = leaving.Sigterm(elastic.leave_within)
        self._told = False  # to leave, at the last launch
        self._leaves = False  # all ranks of the island, after a round that all have
        self._loop: Callable[[], OuterLoop | None] = lambda: None
        island = group.island
        self._island = None if island is None else island.group.connections
        self._called = "rank" if island is None else "island"
        if group.membership is None:
            group.membership = Membership(
                elastic_store(group.store if island is None else island.store),
                group.ranks[group.rank],
                group.timeout,
                leads=island is None or island.group.rank == 0,
                called=self._called,
                counts=_COUNTERS,
            )
        self._membership = group.membership
        if group.waits_to_join:
            (request,) = self._in_island(self._membership.ask())
            self._enter(self._membership.join(request))
        close_at_exit(self)

    def claim(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As ``FixedRanks``. ValueError: another module makes the group's changes."""
        if self._membership.owner() not in (None, self):
            gc.collect()  # a module that is gone may not have been collected yet
        if self._membership.owner() not in (None, self):
            raise ValueError(
                "another module of this process group is wrapped with elastic=True: give each an "
                "own process group, or wrap one module that holds both"
            )
        self._membership.owner = weakref.ref(self)

    @property
    def change_due(self) -> bool:  # type: ignore[override]
        """Whether a round has failed or been postponed, or processes wait to join; equal on all
        ranks in time."""
        return self.failure is not None or self._newcomers or self._late

    # A round.

    def weights(self, own: RankWeights, schedule: Schedule) -> RankWeights:
        if self._elastic.grace is None:
            return own
        return LateWeights(own, schedule.fragments, schedule.interval)

    def gathered(self, part: int) -> bool:
        grace = self._elastic.grace
        if grace is None:
            return True
        changes, self._late = self._membership.gather(self._elastic.quorum, grace)
        if changes:
            self._newcomers, self.postponed = True, part
        return not changes

    def attempt(self, rounds: Callable[[], None], *, due: bool) -> None:
        if self.failure is not None:
            if due:
                raise self.failure  # and no training forward has come to replace the plan
            return
        try:
            rounds()
            if self._island is None:
                self._look_at_the_clock()
            if self._leaves:
                self._leave("its steps are in the anchor")
        except _C.BaguaError as error:
            if error is not self.failure:
                raise

    def _look_at_the_clock(self) -> None:
        """Where this rank is told to leave: await its last round, or leave without one in time."""
        noticed, loop = leaving.noticed(), self._loop()
        if noticed is None or loop is None:
            return
        if self._told:
            loop.end_together()  # now, or what is trained until it is due would be lost
        elif time.monotonic() > noticed + _OF_A_NOTICE * self._elastic.leave_within:
            self._leave("no round came in time, and its steps since the last one are lost")

    def _leave(self, how: str) -> None:
        """End the process. The others do not wait for it in their next round."""
        self._membership.leave()
        own = self._group.ranks[self._group.rank]
        _log.warning("%s %d leaves by notice: %s", self._called, own, how)
        self.close()
        raise SystemExit(0)

    @contextmanager
    def held(self) -> Iterator[None]:
        try:
            yield
        except _C.BaguaMismatchError:
            raise
        except _C.BaguaError as error:
            self._held = error

    def confirm(self, engine: _C.Engine) -> None:
        # All slots are marked. Ranks tell each other whether they have seen a request to join. With
        # a grace that is settled before rounds: what a late rank has trained is to be in one. They
        # tell as well whether one of them leaves after this round.
        self._told = leaving.noticed() is not None
        seen = self._elastic.grace is None and self._membership.requests() > 0
        engine.exchange_used([int(seen or self._told)] * engine.slots)

    def confirmed(self, engine: _C.Engine) -> None:
        self._newcomers = self._newcomers or any(engine.used)

    def receive(self, engine: _C.Engine) -> None:
        failure, self._held = self._held, None
        if failure is None:
            try:
                engine.wait()
                self.confirmed(engine)
            except _C.BaguaMismatchError:
                raise
            except _C.BaguaError as error:
                failure = error
        failed, newcomers, leaves = self._in_island(
            int(failure is not None), int(self._newcomers), int(self._told)
        )
        self._newcomers, self._told = bool(newcomers), False
        self._leaves = bool(leaves) and not failed
        if failed:
            self.failure = self._failed(failure, engine)
            del failure  # or this frame and its traceback would keep each other alive
            raise self.failure

    def _failed(self, failure: _C.BaguaError | None, engine: _C.Engine | None) -> _C.BaguaError:
        """The failure of this rank or, where there is none, of its island, for ``engine`` too."""
        reason = failure or _C.BaguaError("another rank of this island has failed")
        if engine is not None:
            engine.abort(str(reason))
        return reason

    def _in_island(self, *numbers: int) -> list[int]:
        """The maximum of each number over the ranks of this island, which all call it."""
        if self._island is None:
            return list(numbers)
        return self._island.reduce_numbers("a round of this island", _C.ReduceOp.MAX, *numbers)

    # A change of ranks.

    def change(self, loop: OuterLoop, name: str, replace: Callable[[bool], None]) -> None:
        """As ``FixedRanks``; ``replace`` builds the new plan, and is told whether ranks join."""
        self._before, pending = loop, loop.state.pending
        self._missed = None if pending is None else pending.fragment.part
        if self.failure is not None:  # what the failed round was of is not in an anchor
            loop.state.train_all()
            if self._missed is not None:
                loop.state.rank_weights.fail(self._missed)
        postponed = -1 if self.postponed is None else self.postponed
        report = loop.state.counters | {"postponed": postponed + 1}
        for attempt in range(_MOST_ATTEMPTS):
            if self._late and attempt == 0:
                (request,) = self._in_island(self._membership.ask(returns=True))
                change = self._membership.join(request)
            else:
                change = self._membership.change(
                    report, self._elastic.quorum, failed=self.failure is not None
                )
            self._warn(name, report, change)
            if self.failure is None:
                loop.engine.stop(agreed=True)  # all that go on have ended the last round
            self._enter(change)
            failure = None
            try:
                with store_needed():
                    replace(bool(change.joined))
            except _C.BaguaMismatchError:
                raise
            except _C.BaguaError as error:
                failure = error
            (failed,) = self._in_island(int(failure is not None))
            if not failed:
                break
            self.failure = self._failed(failure, self._engine)
            if attempt + 1 == _MOST_ATTEMPTS:
                raise self.failure
        self.failure, self._newcomers, self._late = None, False, False
        self._before, self._engine = None, None

    def _enter(self, change: Change) -> None:
        name = f"generation{change.generation}/connections"
        store = c10d.PrefixStore(name, elastic_store(self._group.store))
        self._group.replace_members(change.members, store)
        if self._island is not None and self._group.rank == 0:  # the leaders' store is another one
            forget_old(elastic_store(self._group.store), change.generation, ())
        self._engine = None
        self._transfer = transfer = StateTransfer.after(change)
        if transfer.joined:
            some = [transfer.source, *transfer.joined]
            self._group.admission = self._group.connect_some("admission", some)

    def inherited_state(self) -> OuterState | None:
        """A copy of the state before: a change that fails leaves it unchanged."""
        return None if self._before is None else self._before.state.copy()

    @property
    def agrees(self) -> bool:
        return self._transfer is not None

    def begin(self, loop: OuterLoop) -> None:
        self._loop = weakref.ref(loop)
        if not self._membership.lives:
            self._membership.found(self._group.ranks)
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        self._engine = loop.engine
        some = [self._group.admission, self._give_anchors(loop, transfer)]
        own, before = self._group.ranks[self._group.rank], self._before
        if own in transfer.joined:
            loop.take_anchors()
        elif self._late and before is not None:
            loop.follow(before)
        elif own in transfer.behind and before is not None:
            self._use_missed(before, loop, changed=transfer.counters["outer_rounds"])
        loop.state.go_on_at(transfer.counters)
        postponed = transfer.counters["postponed"] - 1
        self.postponed = None if postponed < 0 else postponed
        agreed = f"anchors and momenta {loop.state.digest()}"
        self._group.connections.agree("their anchors", [agreed])
        for connections in filter(None, some):
            connections.forget_left()
        self._group.admission = None

    def _use_missed(self, before: OuterLoop, loop: OuterLoop, changed: int) -> None:
        """Use the anchor of a round that failed here, after others had made ``changed`` of them."""
        if self._missed is not None and changed != before.state.outer_rounds:
            before.commit(self._missed)
            loop.state.rank_weights.settle(self._missed)
            loop.give_anchor(loop.state.fragments[self._missed], late=loop.overlaps)

    def _give_anchors(self, loop: OuterLoop, transfer: StateTransfer) -> Connections | None:
        """Returns the connections that it took."""
        joining = sorted(transfer.joined + transfer.behind)
        if not joining:
            return None
        some = self._group.connect_some("outer", [transfer.source, *joining])
        if some is None:
            return None
        what = f"giving the anchor of rank {transfer.source}"
        broadcast_fragments(loop.state.fragments, some, what)
        return some

    def _warn(self, name: str, report: Report, change: Change) -> None:
        number = report["communications"] + 1
        called = f"{self._called}(s)"
        left = f"{called} {_listed(sorted(change.reports))} go on"
        reason = str(self.failure).split("\n", maxsplit=1)[0]
        lost = [rank for rank in change.lost if rank not in change.left]
        if change.left:
            gone = f"{called} {_listed(change.left)} left"
            warn_here(f"module '{name}': {gone} before outer round {number}, {left}")
        if change.apart:
            reason = f"{links_in_words(self._called, change.apart)}: {reason}"
        if lost and self.failure is None and self._elastic.grace is not None:
            late = f"{called} {_listed(lost)} did not come in time to outer round {number}"
            text = f"module '{name}': {late}, {left}"
            if not self._told_late.issuperset(lost):
                self._told_late.update(lost)
                warn_here(f"{text}. Later times are logged.")
            _log.info(text)
        elif lost:
            warn_here(
                f"module '{name}': lost {called} {_listed(lost)} in outer round {number}, "
                f"{left}: {reason}"
            )
        elif self.failure is not None and not change.left:
            warn_here(
                f"module '{name}': outer round {number} failed without a loss, {left}: {reason}"
            )
        if change.joined:
            joined = f"{called} {_listed(change.joined)}"
            warn_here(f"module '{name}': {joined} came back before outer round {number}")

    def close(self) -> None:
        self._sigterm.end()
        if self._membership.owner() is self:
            self._membership.owner = lambda: None


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
