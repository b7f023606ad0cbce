"""Work on a mailbox off the main thread: retries with back-off, and waits that can speak."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from bagua import _C
from bagua._core.group.warn import warn_here
from bagua._core.state.step_folder import Damaged
from bagua._outer.mailbox.store import Place

Value = TypeVar("Value")

_FIRST_WORD = 10.0  # seconds after which a wait is told, and again when it has lasted twice as long
_OF_A_DAMAGED_FILE = 5.0  # seconds in which it may become whole
_SLICE = 0.5  # in which the main thread waits: an interrupt ends it


class Closed(Exception):
    """The module was closed while the mailbox was at work for it."""


class Patience:
    """Pauses between looks at a place, until ``seconds`` are over or ``stop`` is set.

    Attributes:
        doing: words for what is waited for.
    """

    def __init__(self, place: Place, seconds: float, stop: threading.Event) -> None:
        self.doing = f"mailbox {place.url}"
        self._place, self._stop = place, stop
        self._began, self._seconds = time.monotonic(), seconds
        self._pause, self._jitter = place.pause[0], random.Random()

    @property
    def over(self) -> bool:
        return time.monotonic() - self._began > self._seconds

    def pause(self) -> None:
        """Twice as long each time, to a bound; islands do not look at the same instants."""
        if self._stop.wait(self._pause * self._jitter.uniform(0.5, 1.0)):
            raise Closed
        self._pause = min(2 * self._pause, self._place.pause[1])

    def wait_for(self, what: str, remedy: str) -> None:
        """Pause before another look. BaguaTimeoutError, with ``remedy``: the time is over."""
        self.doing = what
        if self.over:
            raise _C.BaguaTimeoutError(
                f"mailbox {self._place.url}: {what}, and {self._seconds:g} s are over. {remedy}"
            )
        self.pause()

    def repeat(self, what: str, function: Callable[[], Value]) -> Value:
        """Call ``function`` until it succeeds; its result. BaguaError: the time is over."""
        damaged: float | None = None
        while True:
            try:
                return function()
            except Damaged as error:
                damaged = damaged or time.monotonic()
                if self.over or time.monotonic() - damaged > _OF_A_DAMAGED_FILE:
                    raise _C.BaguaError(
                        f"mailbox {self._place.url}: {what}: {error}. Give the secret that it was "
                        "begun with, or remove that file; or begin anew, with another URL."
                    ) from error
                self.doing = f"{what} ({error})"
            except OSError as error:
                if self.over:
                    raise _C.BaguaError(
                        f"mailbox {self._place.url}: {what} failed for {self._seconds:g} s "
                        f"({self._place.told(error)}). See that it exists, has room and may "
                        "be written, then start this island again: it goes on from there."
                    ) from None  # a client's error may quote credentials
                self.doing = f"{what} ({self._place.told(error)})"
            self.pause()


class Job(Generic[Value]):
    """A function on a thread, and the words for what it waits for."""

    def __init__(self, function: Callable[[Patience], Value], patience: Patience) -> None:
        self._function, self._patience = function, patience
        self._value: Value
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._work, name="bagua mailbox", daemon=True).start()

    def _work(self) -> None:
        try:
            self._value = self._function(self._patience)
        except BaseException as error:  # noqa: BLE001, raised by result()
            self._error = error
        finally:
            self._ended.set()

    def result(self, who: str) -> Value:
        """Wait for it, and return or raise what it has; ``who`` waits, for warnings."""
        began, word = time.monotonic(), _FIRST_WORD
        while not self._ended.wait(_SLICE):
            waited = time.monotonic() - began
            if waited > word:
                warn_here(f"{who} has waited for {waited:.0f} s: {self._patience.doing}")
                word *= 2
        if (error := self._error) is not None:
            self._error = None  # or its traceback would keep frames alive that hold this job
            raise error
        return self._value

    def end(self, seconds: float) -> None:
        """Wait for it, but not for long; its stop is set."""
        self._ended.wait(seconds)
