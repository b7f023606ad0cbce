"""Whether processes live, by heartbeats in the job's store."""

from __future__ import annotations

import secrets
import time
from typing import NamedTuple

from torch.distributed import distributed_c10d as c10d

from bagua import _C

__all__ = ["Life", "Pulse"]

#: A process whose heartbeat has not changed for so long is dead, stopped or cut off. There are two
#: heartbeats a second, from a thread that does not need the interpreter.
SECONDS_OF_SILENCE = 5.0


class Life:
    """Heartbeats of this process, until the object is deleted.

    Attributes:
        name: random; no other process has had it.
    """

    def __init__(self, store: c10d.Store) -> None:
        self.name = secrets.token_hex(8)
        self._board = _C.FailureBoard(_lives(store, self.name), 0, 1)
        self._board.beat(0, "alive")


class _Seen(NamedTuple):
    beat: bytes
    at: float


class Pulse:
    """Watches the heartbeats of other processes: :meth:`silent` is asked again and again."""

    def __init__(self, store: c10d.Store) -> None:
        self._store = store
        self._first: dict[str, bytes] = {}
        self._last: dict[str, _Seen] = {}

    def silent(self, name: str) -> bool:
        """Whether the heartbeat of that :class:`Life` has not changed for some seconds."""
        beat, now = self._look(name), time.monotonic()
        self._first.setdefault(name, beat)
        last = self._last.get(name)
        if last is None or last.beat != beat:
            self._last[name] = _Seen(beat, now)
            return False
        return now - last.at > SECONDS_OF_SILENCE

    def beats(self, name: str) -> bool:
        """Whether the heartbeat has changed since :meth:`silent` was first asked."""
        return name in self._first and self._look(name) != self._first[name]

    def _look(self, name: str) -> bytes:
        store = _lives(self._store, name)
        return bytes(store.get("beat/0")) if store.check(["beat/0"]) else b""


def _lives(store: c10d.Store, name: str) -> c10d.Store:
    return c10d.PrefixStore(f"life/{name}", store)
