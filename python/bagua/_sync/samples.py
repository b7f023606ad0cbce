"""How many samples a rank has said that its next round is of."""

from __future__ import annotations

import math
from typing import SupportsFloat


def checked(number: SupportsFloat) -> float:
    """``number`` of ``bagua_samples``; ValueError where it cannot be one."""
    samples = float(number)
    if not (math.isfinite(samples) and samples >= 0):
        raise ValueError(
            f"bagua_samples({number}): a number of samples or tokens is finite and 0 or more"
        )
    return samples


class SaidSamples:
    """Numbers that were said since the last round, added up.

    Attributes:
        ever: whether one was said since the construction.
    """

    def __init__(self) -> None:
        self.ever = False
        self._of_forward: float | None = None
        self._of_round: float | None = None
        self._last: float | None = None  # of the last round, if it was of this forward

    def add(self, number: SupportsFloat) -> None:
        self._of_forward = (self._of_forward or 0.0) + checked(number)
        self.ever = True

    def forward_begins(self, with_gradients: bool) -> None:
        """Numbers of a forward without gradients, an evaluation's, do not count."""
        said, self._of_forward = self._of_forward, None
        self._last = None
        if with_gradients and said is not None:
            self._of_round = (self._of_round or 0.0) + said

    def take(self) -> float | None:
        """The round begins: its number; None: none was said.

        Another round of the same forward, of a second backward, has the same number.
        """
        if self._of_round is not None:
            self._last, self._of_round = self._of_round, None
        return self._last
