"""Words in the job's store, read and written without a wait that hangs."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d as c10d

_PAUSES = (0.001, 0.02)  # seconds between two looks at the store: the first, and the longest
_STORE_SECONDS = 5.0  # that one question to a living store may take
_LONGEST_WORD = 1 << 20  # bytes


class StoreTimeoutError(RuntimeError):
    """The job's store does not answer."""


class MissingReplyError(RuntimeError):
    """A rank has not written what was expected of it."""


class Meeting:
    """The keys of one store, for one thread.

    The store is asked by a thread of its own, which is left to itself when the store's host no
    longer answers: clients of torch's store then wait without a limit.
    """

    def __init__(self, store: c10d.Store) -> None:
        self._store = store
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]
        self._questions = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="bagua-store", daemon=True).start()

    def write(self, key: str, word: Any) -> None:
        text = json.dumps(word)
        self._ask(lambda: self._store.set(key, text))

    def has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def read(self, key: str, seconds: float) -> Any:
        """The JSON under ``key``, which may come within ``seconds``, or MissingReplyError."""
        deadline, pause = time.monotonic() + seconds, _PAUSES[0]
        while not self.has(key):
            if time.monotonic() > deadline:
                raise MissingReplyError(f"no '{key}' within {seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        value = bytes(self._ask(lambda: self._store.get(key)))
        try:
            return json.loads(value) if len(value) <= _LONGEST_WORD else None
        except (ValueError, RecursionError) as error:
            raise MissingReplyError(f"'{key}' has {value[:40]!r}") from error

    def _ask(self, question: Callable[[], Any]) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._questions.put((question, answers))
        try:
            answer = answers.get(timeout=_STORE_SECONDS)
        except queue.Empty:
            raise StoreTimeoutError(f"no answer within {_STORE_SECONDS:g} s") from None
        if isinstance(answer, RuntimeError):
            raise StoreTimeoutError(str(answer).splitlines()[0]) from answer
        return answer

    def _serve(self) -> None:
        while True:
            question, answers = self._questions.get()
            try:
                answers.put(question())
            except RuntimeError as error:  # of the store: torch's DistError is one
                answers.put(error)
