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
from bagua._outer import leaving
from bagua._outer.mailbox.places import pause_at, shown
from bagua._outer.mailbox.store import told

Value = TypeVar("Value")

_FIRST_WORD = 10.0  # seconds after which a wait is told, and again when it has lasted twice as long
_OF_A_DAMAGED_FILE = 5.0  # seconds in which it may become whole
_SLICE = 0.1  # in which the main thread waits: an interrupt ends it
_OF_A_CALL = 5.0  # seconds in which a call of the storage may end when the time is over
# Parts of the seconds to leave in: for waits, and with a call that hangs. ``rounds.py`` has that of
# the end; the rest is the script's.
_OF_A_NOTICE, _WITH_A_CALL = 0.6, 0.7


class Noticed(_C.BaguaTimeoutError):
    """The time that a notice gives to waits is over: this process is to leave."""


class Closed(Exception):
    """The module was closed while the mailbox was at work for it."""


class Patience:
    """Pauses between looks at a place, until ``seconds`` are over or ``stop`` is set.

    After a notice (``leaving.py``) waits have a part of ``leave_within`` seconds from it.

    Attributes:
        who: the mailbox, for messages.
        doing: words for what is waited for.
        calling: words for the last call of the storage.
    """

    def __init__(
        self, url: str, seconds: float, leave_within: float, stop: threading.Event
    ) -> None:
        self.who, self.doing, self.calling = f"mailbox {shown(url)}", "no answer yet", "reaching it"
        self._url, self._stop, self._leave_within = url, stop, leave_within
        self._began, self._seconds = time.monotonic(), seconds
        self._pause, self._most = pause_at(url)
        self._jitter = random.Random()

    def over(self, *, calls: bool = False) -> type[_C.BaguaError] | None:
        """The class of the error where the time is over. ``calls``: also that of a call."""
        now, notice = time.monotonic(), leaving.noticed()
        part = _WITH_A_CALL if calls else _OF_A_NOTICE
        if notice is not None and now > notice + part * self._leave_within:
            return Noticed
        seconds = self._seconds + (_OF_A_CALL if calls else 0.0)
        return _C.BaguaTimeoutError if now > self._began + seconds else None

    def _span(self, kind: type[_C.BaguaError]) -> str:
        of_a_notice = f"{_OF_A_NOTICE * self._leave_within:g} s of a notice"
        return of_a_notice if kind is Noticed else f"{self._seconds:g} s"

    def give_up(self) -> None:
        """End the work at its next call of the storage."""
        self._stop = threading.Event()
        self._stop.set()

    def pause(self) -> None:
        """Twice as long each time, to a bound; islands do not look at the same instants."""
        if self._stop.wait(self._pause * self._jitter.uniform(0.5, 1.0)):
            raise Closed
        self._pause = min(2 * self._pause, self._most)

    def wait_for(self, what: str, remedy: str) -> None:
        """Pause before another look. BaguaTimeoutError, with ``remedy``: the time is over."""
        self.doing = what
        if kind := self.over():
            raise kind(f"{self.who}: {what}, and {self._span(kind)} are over. {remedy}")
        self.pause()

    def repeat(self, what: str, function: Callable[[], Value]) -> Value:
        """Call ``function`` until it succeeds; its result. BaguaError: the time is over."""
        damaged: float | None = None
        while True:
            if self._stop.is_set():
                raise Closed
            self.calling = what
            try:
                return function()
            except Damaged as error:
                damaged = damaged or time.monotonic()
                if self.over() or time.monotonic() - damaged > _OF_A_DAMAGED_FILE:
                    raise _C.BaguaError(
                        f"{self.who}: {what}: {error}. Give the secret that it was "
                        "begun with, or remove that file; or begin anew, with another URL."
                    ) from error
                self.doing = f"{what} ({error})"
            except OSError as error:
                if kind := self.over():
                    raise kind(
                        f"{self.who}: {what} failed for {self._span(kind)} "
                        f"({told(error, self._url)}). See that it exists, has room and may "
                        "be written, then start this island again: it goes on from there."
                    ) from None  # a client's error may quote credentials
                self.doing = f"{what} ({told(error, self._url)})"
            self.pause()


class Task(Generic[Value]):
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
        """Wait for it, and return or raise what it has; ``who`` waits, for warnings.

        BaguaTimeoutError: a call of the storage has not ended when the time was over.
        """
        began, word = time.monotonic(), _FIRST_WORD
        while not self._ended.wait(_SLICE):
            waited = time.monotonic() - began
            patience = self._patience
            if kind := patience.over(calls=True):
                patience.give_up()
                raise kind(
                    f"{who} has waited for {waited:.0f} s, and {patience.who} does not answer "
                    f"({patience.calling}). See that this machine reaches it, then start this "
                    "island again: it goes on from there."
                )
            if waited > word:
                warn_here(f"{who} has waited for {waited:.0f} s: {patience.who}: {patience.doing}")
                word *= 2
        if (error := self._error) is not None:
            self._error = None  # or its traceback would keep frames alive that hold this task
            raise error
        return self._value

    def end(self, seconds: float) -> None:
        """Wait for it, but not for long; its stop is set."""
        self._ended.wait(seconds)
