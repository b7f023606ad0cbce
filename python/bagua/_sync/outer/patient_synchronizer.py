"""Outer rounds that wait for nobody."""

from __future__ import annotations

from bagua import _C
from bagua._sync.outer.outer_synchronizer import OuterSynchronizer
from bagua._sync.outer.weights.fragment import Fragment
from bagua._sync.plan import part_of_the_round

__all__ = ["PatientSynchronizer"]


class PatientSynchronizer(OuterSynchronizer):
    """Ranks make different numbers of steps between rounds, of one fragment.

    Note [Rounds that wait for nobody]
    1. A rank whose ``interval`` steps are over asks for a round: it begins one, and trains on while
       the agreement runs in the background.
    2. After the first step at which all have asked it launches the round, and so does every other
       rank after its own next step. Pseudo-gradients are cumulative: steps made meanwhile count.
    3. After ``patience`` steps a rank launches nevertheless, and waits.
    4. At each launch the ranks tell each other whether they are in :meth:`sync`. A rank inside
       asks for rounds until one is made that all are inside for.

    So no clock of a rank decides: a round begins when the slowest has asked for it.
    """

    _ending = False  # this rank is in sync()
    _all_end = False  # all ranks were, at the last launch

    def _due(self) -> int | None:
        schedule = self._arguments.schedule
        if self._flight is not None or not schedule.meets_after(self.steps):
            return None
        self.engine.begin_round(part=0)  # again, where it has been asked for, which does nothing
        waits = schedule.patience is not None and self.steps >= schedule.patience
        return 0 if waits or self.engine.agreed else None

    def _begin(self, fragment: Fragment) -> bool:
        super()._begin(fragment)
        self.engine.await_agreement()
        with part_of_the_round(self.engine):
            ending, idle = self._connections.reduce_numbers(
                "launching an outer round",
                _C.ReduceOp.MIN,
                int(self._ending),
                int(not self._trained),
            )
        self._all_end = bool(ending)
        self.steps = 0
        return bool(idle)

    def _end_step(self) -> None:
        survival = self._arguments.survival
        if survival is not None and survival.failure is not None:
            self.steps = 0  # the next round is an interval away

    def _sync(self) -> None:
        self._resume()
        if self._flight is not None:
            self._arrive(late=True)
        self._ending, self._all_end = True, False
        try:
            while not self._all_end:
                self._launch(self.fragments[0], 0)
                self._arrive(late=False)
        finally:
            self._ending = False
        self.weights.take_anchors()
        self._trained = False
        self.steps = 0
