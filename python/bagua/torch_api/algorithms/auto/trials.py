"""Trials of ``AutoAlgorithm``: candidates train for some steps each, and their steps are timed."""

from __future__ import annotations

from collections.abc import Sequence

from bagua._core.group.connections import Connections
from bagua._foresight.candidate import Candidate
from bagua.torch_api.algorithms.auto.agreed import largest
from bagua.torch_api.algorithms.auto.choice import Row
from bagua.torch_api.algorithms.auto.probe.steps import StepTimes

__all__ = ["Trials"]

_WHAT = "trying candidates of AutoAlgorithm"
#: (Seconds of a step, most steps of a trial): the first that is not exceeded. Trials of four
#: candidates take 4 s or fewer up to a quarter of a second.
_STEPS = ((0.03, 16), (0.07, 12), (0.25, 3), (1.0, 2), (float("inf"), 1))
#: Trials of more steps leave their first half out: a connection takes some tenths of a second to
#: find its speed for messages of other sizes.
_MOST_COUNTED_WHOLE = 4


def _steps_of(row: Row) -> int:
    """Steps that a candidate of so long a step is to be timed for."""
    return next(steps for seconds, steps in _STEPS if row.seconds <= seconds)


class Trials:
    """Rows whose candidates are tried one after another.

    Args:
        rows: in this order.
        most_steps: of all trials; at least two for each row.

    Attributes:
        at_work: the candidate that trains now.
        measured: seconds of a step of those before it, the same on all ranks.
        rounds: that have ended.
    """

    def __init__(self, connections: Connections, rows: Sequence[Row], most_steps: int) -> None:
        self._connections = connections
        self._rows = list(rows)
        self._most = max(1, most_steps // len(self._rows) - 1)
        self._times = StepTimes()
        self.measured: dict[Candidate, float] = {}
        self.rounds = 0
        self._next()

    def _next(self) -> None:
        row = self._rows.pop(0)
        self.at_work = row.candidate
        self._steps = min(_steps_of(row), self._most)
        self._rounds = 0
        self._times.restart(leave_out=1)  # buckets were built in it

    def forward_begins(self) -> None:
        """Called before the forward of every step."""
        self._times.forward_begins()

    def round_ended(self) -> bool:
        """Called after every round; whether ``at_work`` has changed, or all have been tried."""
        self._times.backward_ended(0.0)
        self._rounds += 1
        self.rounds += 1
        if self._rounds == self._steps // 2 and self._steps > _MOST_COUNTED_WHOLE:
            self._times.restart()
        if self._rounds <= self._steps:
            return False
        (seconds,) = largest(self._connections, _WHAT, [self._times.whole()])
        self.measured[self.at_work] = seconds
        if self._rows:
            self._next()
        return True

    @property
    def done(self) -> bool:
        """Whether all have been tried."""
        return not self._rows and self.at_work in self.measured
