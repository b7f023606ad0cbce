"""The steps at which fragments are averaged."""

from __future__ import annotations

__all__ = ["Schedule"]


class Schedule:
    """Every fragment once in ``interval`` steps, one after the other, equally far apart.

    Args:
        interval: steps.
        fragments: their number. Fragment f is launched after ``(f + 1) * interval // fragments``
            steps of each cycle.
        overlap: steps from a launch to the arrival of its result.

    Raises:
        ValueError: two fragments would be under way at once.
    """

    def __init__(self, interval: int, fragments: int, overlap: int) -> None:
        offsets = [(f + 1) * interval // fragments for f in range(fragments)]
        gaps = [b - a for a, b in zip([0, *offsets], offsets, strict=False)]
        if min(gaps) < 1:
            raise ValueError(
                f"fragments={fragments} of which one is averaged after another need an interval of "
                f"as many steps, not interval={interval}"
            )
        if overlap >= min(gaps):
            raise ValueError(
                f"overlap_steps={overlap} must be below {min(gaps)}, the steps from one fragment "
                f"to the next with interval={interval} and {fragments} fragment(s)"
            )
        self._parts = {offset: part for part, offset in enumerate(offsets)}
        self.interval = interval
        self.fragments = fragments
        self.overlap = overlap

    def launched_after(self, steps: int) -> int | None:
        """The fragment that is launched after so many steps of the cycle, 1 to ``interval``."""
        return self._parts.get(steps)
