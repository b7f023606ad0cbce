"""Words in the job's store: written and read without a wait that hangs, checked before use."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import distributed_c10d as c10d

from bagua._core.group.rendezvous import Pause, value_in
from bagua._tools.report import printable

Word = TypeVar("Word")

_PAUSES = (0.001, 0.02)  # seconds between two looks at the store: the first, and the longest
_STORE_SECONDS = 5.0  # that one question to a living store may take
_LONGEST_WORD = 1 << 20  # bytes
_LONGEST_TEXT = 200  # characters


class StoreTimeoutError(RuntimeError):
    """The job's store does not answer."""


class MissingReplyError(RuntimeError):
    """A rank has not written what was expected of it."""


class Meeting:
    """The keys of one store, for one thread.

    The store is asked by a separate thread, which is left to itself when the store's host no
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

    def read(self, key: str, seconds: float, form: Callable[[Any], Word]) -> Word:
        """What ``form`` makes of the JSON under ``key``, which may come within ``seconds``.

        Raises MissingReplyError where nothing comes, BaguaError where ``form`` refuses it.
        """
        deadline, pause = time.monotonic() + seconds, Pause(*_PAUSES)
        while not self.has(key):
            if time.monotonic() > deadline:
                raise MissingReplyError(f"no '{key}' within {seconds:g} s")
            pause.take()
        value = bytes(self._ask(lambda: self._store.get(key)))
        return value_in(value, key, form, _LONGEST_WORD)

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


# Forms of words: each raises ValueError for a word that another one has written.


def made(word: Word | None) -> Word:
    """Something, where None says that a word was refused."""
    if word is None:
        raise ValueError
    return word


def one_of(word: Any, *allowed: Any) -> Any:
    """One of some plain values."""
    if not any(type(word) is type(value) and word == value for value in allowed):
        raise ValueError(word)
    return word


def finite(word: Any, least: float = -math.inf) -> float:
    """A finite number of at least ``least``."""
    if type(word) not in (int, float) or not (math.isfinite(word) and word >= least):
        raise ValueError(word)
    return float(word)


def text(word: Any) -> str:
    """A text, cut and printable."""
    if type(word) is not str:
        raise ValueError(word)
    return printable(word[:_LONGEST_TEXT])


def mapping(word: Any, keys: set[str]) -> dict[str, Any]:
    """An object with these keys alone."""
    if type(word) is not dict or word.keys() != keys:
        raise ValueError(word)
    return word
