"""The share of rounds whose result held NaN or infinity."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping

from bagua import _C
from bagua._guard.arguments import Guard

__all__ = ["NonFiniteShare"]


class NonFiniteShare:
    """Compares the counters of a plan every so many rounds, and warns where training stands still.

    Each rank decides for itself, and nothing that is sent depends on it.

    Attributes:
        share: of the rounds between the last two checks; None: not measured yet, or not counted.
    """

    def __init__(self, guard: Guard, speaks: bool, module_name: str) -> None:
        self.share: float | None = None
        self._guard = guard
        self._speaks = speaks
        self._module_name = module_name
        self._warned = False
        self.restart(0)

    def restart(self, rounds: int) -> None:
        """Count from round ``rounds`` on."""
        self._since = rounds
        self._counted: dict[str, tuple[_C.NonFiniteRounds, int]] = {}

    def check(self, rounds: int, counters: Mapping[str, _C.NonFiniteRounds]) -> None:
        """Called before each round, of which there were ``rounds``; ``counters``: by bucket."""
        if rounds - self._since < self._guard.every:
            return
        most = max((self._added(name, counter) for name, counter in counters.items()), default=None)
        self.share = None if most is None else most / (rounds - self._since)
        self._since = rounds
        self._counted = {name: (counter, counter.count) for name, counter in counters.items()}
        above = self.share is not None and self.share > self._guard.nonfinite
        if above and not self._warned and self._speaks:
            with contextlib.suppress(Warning):  # no reason to end a step
                warnings.warn(
                    f"module '{self._module_name}': {self.share:.0%} of the last rounds held NaN "
                    f"or infinity, more than nonfinite={self._guard.nonfinite:g}. Exact averages "
                    "would not be finite either: lower the learning rate, clip gradients, or "
                    "check the loss and the scale of a GradScaler.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._warned = above

    def _added(self, name: str, counter: _C.NonFiniteRounds) -> int:
        before, count = self._counted.get(name, (None, 0))
        return counter.count - (count if before is counter else 0)
