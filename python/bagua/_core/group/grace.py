"""The time that a round gives late members: of elastic groups and of mailboxes."""

from __future__ import annotations

import time
from collections.abc import Callable

#: The least that members wait after the quorum has come, in seconds.
_LEAST = 1.0


class Grace:
    """When a round begins without members that are late.

    Once ``least`` have come the others have twice as long as those took, at least a second and at
    most ``seconds``. It begins when the object is made.

    Args:
        least: members that a round needs.
        seconds: None: no member that lives is left out.
        clock: in seconds.
    """

    def __init__(
        self, least: int, seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._least, self._seconds, self._clock = least, seconds, clock
        self._began, self._complete = clock(), 0.0

    @property
    def waited(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    def over(self, here: int, expected: int) -> bool:
        """Whether nobody waits any longer: ``here`` have come, ``expected`` more live."""
        now = self.waited
        if here < self._least:
            self._complete = now
        if expected == 0:
            return True
        limit = max(_LEAST, 2 * self._complete)
        return self._seconds is not None and now - self._complete > min(self._seconds, limit)
