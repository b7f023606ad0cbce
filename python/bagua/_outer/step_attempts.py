"""Steps of an optimizer, counted when they are attempted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bagua._sync.hooks import WeakHook

__all__ = ["StepAttempts", "attempt_of"]

_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[StepAttempts]]] = (
    weakref.WeakKeyDictionary()
)


class StepAttempts:
    """Calls ``attempted`` after each ``step()`` of ``optimizer``.

    A step that a ``GradScaler`` skips on this rank counts: ranks skip different ones, and must
    meet after equal numbers of steps. ``attempted`` is a method; its object is not kept alive.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, attempted: Callable[[], None]) -> None:
        self.count = 0
        self._attempted = weakref.WeakMethod(attempted)
        self._handle = optimizer.register_step_post_hook(WeakHook(self.note))
        watchers = _watched.setdefault(optimizer, [])
        watchers[:] = [watcher for watcher in watchers if watcher() is not None]
        watchers.append(weakref.ref(self))

    def note(self) -> None:
        """Count an attempt."""
        self.count += 1
        if (attempted := self._attempted()) is not None:
            attempted()

    def close(self) -> None:
        """Count no more. Idempotent."""
        self._handle.remove()
        self._attempted = lambda: None  # type: ignore[assignment]


@contextmanager
def attempt_of(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside it ``optimizer`` steps, or a scaler finds that it cannot."""
    watchers = [watcher() for watcher in _watched.get(optimizer, [])]
    before = [(watcher, watcher.count) for watcher in watchers if watcher is not None]
    yield
    for watcher, count in before:
        if watcher.count == count:
            watcher.note()
