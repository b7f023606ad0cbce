"""Outer rounds that outlive ranks.

Note [Elastic rounds]
A round changes anchor and momentum only when this rank has met all others after the mean was there:
they exchange a byte behind the last bucket of a lane (:meth:`Survival.meet`). What fails before is
noted and changes nothing: the weights stay, and the next pseudo-gradient, which is cumulative,
carries what the lost round would have.

1. In the next training forward the ranks agree on who is left (Note [Generations]), connect anew
   and build new buckets. Each takes over its own anchor and momentum.
2. A failure may strike some ranks after others have met. Those have made one round more than the
   rest, which gets anchor and momentum from the lowest of them and uses the result of that round.
3. Ranks that join get the model, buffers and the state of the optimizers from the same rank, then
   anchor, momentum and counters; their weights begin as the anchor.
4. All compare their anchors before they go on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from bagua import _C
from bagua._core.group.elastic.arrival import elastic_store
from bagua._core.group.elastic.membership import Change, Membership, Report, store_needed
from bagua._core.group.process_group import BaguaProcessGroup

__all__ = ["Heritage", "Mortal", "Survival"]

#: Changes in a row that may fail before the training does.
_MOST_ATTEMPTS = 5


class Mortal:
    """A lost rank is an error: stands where :class:`Survival` does with ``elastic``."""

    failure = None

    def attempt(self, rounds: Callable[[], None]) -> None:
        """Call ``rounds``."""
        rounds()

    def meet(self, engine: _C.Engine) -> None:
        """Nothing is exchanged behind a round."""

    def met(self, engine: _C.Engine) -> None:
        """The round is over."""


@dataclass(frozen=True)
class Heritage:
    """The giver of state and its takers, in global ranks.

    Attributes:
        source: the lowest rank that has made most rounds.
        behind: ranks that have made one less.
        joined: new ones.
        counters: those of ``source``.
    """

    source: int
    behind: list[int]
    joined: list[int]
    counters: Report

    @staticmethod
    def of(change: Change) -> Heritage:
        """After a decision."""
        rounds = {rank: report["communications"] for rank, report in change.reports.items()}
        most = max(rounds.values())
        source = min(rank for rank in rounds if rounds[rank] == most)
        behind = sorted(rank for rank in rounds if rounds[rank] < most)
        return Heritage(source, behind, change.joined, change.reports[source])


class Survival:
    """The members of an elastic algorithm's group, as it knows them.

    Args:
        group: whose members change, in place. In a process that comes back this joins it.
        least: ranks without which nobody goes on.

    Attributes:
        failure: of a round since the last change; None: there was none.
        heritage: until the plan after a change is complete.

    Raises:
        ValueError: another wrapped module makes the group's changes.
        BaguaError: the job that this process comes back to is gone.
    """

    def __init__(self, group: BaguaProcessGroup, least: int) -> None:
        self.failure: _C.BaguaError | None = None
        self.heritage: Heritage | None = None
        self._group = group
        self._least = least
        self._newcomers = False
        own = group.ranks[group.rank]
        if group.membership is None:
            group.membership = Membership(elastic_store(group.store), own, group.timeout)
        self._membership = group.membership
        if self._membership.owner() is not None:
            raise ValueError(
                "another module of this process group is wrapped with elastic=True: give each an "
                "own process group, or wrap one module that holds both"
            )
        if group.waits_to_join:
            self._enter(self._membership.join())
        self._membership.owner = weakref.ref(self)

    @property
    def change_due(self) -> bool:
        """Whether a round has failed, or processes wait to join; equal on all ranks in time."""
        return self.failure is not None or self._newcomers

    def found(self) -> None:
        """Begin the first generation; on a group that has begun nothing happens."""
        if not self._membership.lives:
            self._membership.found(self._group.ranks)

    def attempt(self, rounds: Callable[[], None]) -> None:
        """Call ``rounds``, unless a round before has failed, and note a failure."""
        if self.failure is not None:
            return
        try:
            rounds()
        except _C.BaguaMismatchError:
            raise
        except _C.BaguaError as error:
            self.failure = error

    def meet(self, engine: _C.Engine) -> None:
        """Have :meth:`Engine.wait` end the open round when all ranks have its result.

        All slots are marked. Ranks tell each other whether they have seen a request to join.
        """
        seen = self._membership.unsettled(self._membership.requests())
        engine.exchange_used([int(seen)] * engine.slots)

    def met(self, engine: _C.Engine) -> None:
        """All ranks have the result of the round, for all that this rank knows."""
        self._newcomers = self._newcomers or any(engine.used)

    def change(self, name: str, report: Report, replace: Callable[[bool], None]) -> None:
        """Agree on the members, and replace the plan.

        Args:
            name: of the module.
            report: this rank's counters.
            replace: builds the plan; its argument is whether ranks join.

        Raises:
            BaguaError: too few ranks are left, this one was given up, or changes fail repeatedly.
        """
        for attempt in range(_MOST_ATTEMPTS):
            change = self._membership.change(report, self._least)
            self._warn(name, report, change)
            self._enter(change)
            try:
                with store_needed():
                    replace(bool(change.joined))
                break
            except _C.BaguaMismatchError:
                raise
            except _C.BaguaError as error:
                self.failure = error
                if attempt + 1 == _MOST_ATTEMPTS:
                    raise
        self.failure, self._newcomers = None, False

    def _enter(self, change: Change) -> None:
        self._group.replace_members(change.members, self._membership.connections_store())
        self.heritage = heritage = Heritage.of(change)
        if heritage.joined:
            some = [heritage.source, *heritage.joined]
            self._group.admission = self._group.connect_some("admission", some)

    def _warn(self, name: str, report: Report, change: Change) -> None:
        number = report["communications"] + 1
        left = f"rank(s) {_listed(sorted(change.reports))} go on"
        reason = str(self.failure).split("\n", maxsplit=1)[0]
        if change.lost:
            _warn(
                f"module '{name}': lost rank(s) {_listed(change.lost)} in outer round {number}, "
                f"{left}: {reason}"
            )
        elif self.failure is not None:
            _warn(f"module '{name}': outer round {number} failed without a loss, {left}: {reason}")
        if change.joined:
            joined = _listed(change.joined)
            _warn(f"module '{name}': rank(s) {joined} came back before outer round {number}")

    def close(self) -> None:
        """Let another module make the group's changes."""
        self._membership.owner = lambda: None


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _warn(text: str) -> None:
    """A lost rank is no reason to end the others, not even where warnings are errors."""
    with suppress(Warning):
        warnings.warn(text, RuntimeWarning, stacklevel=2)
