"""A notice that this process is about to be taken away: SIGTERM, or :func:`leave`."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

_noticed: float | None = None
_last: threading.Timer | None = None  # ends a process that a SIGTERM has not


def leave() -> None:
    """Have this process leave its mailbox or elastic group, and end with status 0.

    An island of a mailbox makes a last round after the present step or, where the others do not
    come to one within most of ``leave_within``, leaves its contribution for their next. It gives
    its name back, so that nobody waits for it. A rank of an elastic group takes part in the next
    round and tells the others, who make the one after it without it; where none comes in time, its
    steps since the last one are lost. Then ``optimizer.step()`` raises ``SystemExit(0)``: what the
    script does in ``finally`` is done. SIGTERM does the same where the script has no handler for
    it; call this in a handler, or where the machine's owner tells of its end in another way. It
    only notes the wish, and may be called from any thread. Without either it does nothing.

    Example::

        if spot_notice():
            bagua.leave()
    """
    global _noticed
    _noticed = time.monotonic() if _noticed is None else _noticed


def noticed() -> float | None:
    """The ``time.monotonic()`` of the notice; None: there was none."""
    return _noticed


class Sigterm:
    """Makes SIGTERM a notice, until :meth:`end`; a handler that is there already stays.

    A process that has not left after ``seconds``, or gets a second SIGTERM, ends by it.
    """

    def __init__(self, seconds: float) -> None:
        global _noticed
        _noticed = None  # without one it does nothing
        self._process, self._seconds = os.getpid(), seconds
        free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if free and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._told)

    def _told(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != self._process:  # a child, such as a worker that loads data
            os.kill(os.getpid(), signal.SIGTERM)
            return
        global _last
        _last = threading.Timer(self._seconds, os.kill, (self._process, signal.SIGTERM))
        _last.daemon = True
        _last.start()
        leave()

    def end(self) -> None:
        """Forget the notice, also one that another mailbox's has taken; end by SIGTERM again."""
        global _noticed, _last
        if _last is not None:
            _last.cancel()
        _noticed = _last = None
        mine = signal.getsignal(signal.SIGTERM) == self._told
        if mine and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
