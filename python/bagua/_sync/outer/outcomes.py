"""Outcomes of the rounds of fragments, by which residuals change."""

from __future__ import annotations

from bagua import _C

__all__ = ["Outcomes"]


class Outcomes:
    """Residuals of a fragment change with a round that all ranks have the result of.

    Each operation of a round reports whether its bucket is finite (Note [Memory commits with the
    round] in the C++ core). The fragment is one more part of the round, and reports in
    :meth:`commit`: a round that fails after its last operation changes no residual.
    """

    def __init__(self) -> None:
        self._outcomes: dict[int, _C.RoundOutcome] = {}
        self._committed: dict[int, int] = {}  # the last round, by fragment

    def of(self, part: int) -> _C.RoundOutcome:
        """The outcome that the memories of a fragment's operations share."""
        if part not in self._outcomes:
            self._outcomes[part] = _C.RoundOutcome()
            _C.RoundMemory([], self._outcomes[part])  # joins, and is not needed any more
        return self._outcomes[part]

    def commit(self, part: int) -> None:
        """The last round of a fragment has its result on all ranks. Idempotent."""
        outcome = self._outcomes.get(part)
        if outcome is not None and self._committed.get(part) != outcome.newest:
            self._committed[part] = outcome.newest
            outcome.leave(outcome.newest)
