"""Optimizer steps: attempted ones, those that never come, and those that only make state."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bagua import BaguaError
from bagua._sync.hooks import DroppedOnCopy, WeakHook

#: Training forwards with changed parameters and without a step, after which training ends.
_MOST = 20
_SAMPLED_PARAMETERS = 8
_FRAMES = 16  # from a hook to who has called step(), through schedulers and wrappers


def only_makes_state() -> bool:
    """Whether the ``step()`` under way is one by which torch's state-dict functions make state.

    They call it, with learning rate and gradients 0, where an optimizer has no state, maybe on one
    rank alone, and in each call for one that never has any (SGD without momentum).
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_code.co_name == "_init_optim_state":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def part_of_a_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the ``step()`` whose hook calls this runs in another of the same optimizer.

    torch hooks the step of each class, so that a subclass that calls ``super().step()`` has two.
    """
    frame = sys._getframe(2).f_back
    for _ in range(_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


class StepHook(WeakHook):
    """Calls a method at steps of an optimizer, not at those inside another of the same one."""

    def __call__(self, optimizer: Any = None, *_: Any) -> None:
        if not part_of_a_step(optimizer):
            super().__call__()


class MissingSteps:
    """Counts training forwards before which parameters changed, but no given optimizer has stepped.

    Accumulation changes no parameter, nor does a step that a ``GradScaler`` skips. Forwards inside
    a ``step()`` (LBFGS) do not count, and with several optimizers one that steps is enough.
    """

    def __init__(
        self,
        module_name: str,
        algorithm_name: str,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self._module_name = module_name
        self._algorithm_name = algorithm_name
        self._optimizers = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        every = max(1, len(parameters) // _SAMPLED_PARAMETERS)
        self._sample = list(parameters)[::every]
        self._versions = self._read()
        self._count = 0
        self._stepping = False
        self.handles: list[RemovableHandle] = []
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(StepHook(self._begin_step)))
            self.handles.append(optimizer.register_step_post_hook(StepHook(self._end_step)))

    def _begin_step(self) -> None:
        self._count, self._stepping = 0, True

    def _end_step(self) -> None:
        self._count, self._stepping = 0, False

    def _read(self) -> int:
        return sum(parameter._version for parameter in self._sample)

    def at_forward(self) -> None:
        """Count a training forward whose backward communicates; raise after too many."""
        before, self._versions = self._versions, self._read()
        if before == self._versions or self._stepping:
            return
        self._count += 1
        if self._count > _MOST:
            raise BaguaError(
                f"module '{self._module_name}': its parameters have changed before each of "
                f"{_MOST} training forwards, and no optimizer given to bagua.wrap "
                f"({self._optimizers}) has made a step, so {self._algorithm_name} does not "
                "communicate and the ranks train apart. Give bagua.wrap the optimizer whose "
                "step() is called: make it before the wrap, or call bagua.wrap again, on every "
                "rank, with the new one."
            )


class StepAttempts(DroppedOnCopy):
    """Calls ``attempted`` after each ``step()`` of ``optimizer``.

    A step that a ``GradScaler`` skips on this rank counts: ranks skip different ones, and must
    meet after equal numbers of steps. A step that only makes state does not: one of
    :func:`only_makes_state`, or with no :meth:`forward` before it and learning rates of 0.
    ``attempted`` is a method; its object is not kept alive.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, attempted: Callable[[], None]) -> None:
        self.count = 0
        self._forward = False
        self._optimizer = weakref.ref(optimizer)
        self._attempted = weakref.WeakMethod(attempted)
        self._handle = optimizer.register_step_post_hook(self)
        watchers = _watched.setdefault(optimizer, [])
        watchers[:] = [watcher for watcher in watchers if watcher() is not None]
        watchers.append(weakref.ref(self))

    def forward(self) -> None:
        """A training forward begins."""
        self._forward = True

    def __call__(self, optimizer: torch.optim.Optimizer | None = None, *_: Any) -> None:
        if only_makes_state() or not (self._forward or self._moves()):
            return
        if optimizer is not None and part_of_a_step(optimizer):
            return
        self._forward = False
        self.count += 1
        if (attempted := self._attempted()) is not None:
            attempted()

    def _moves(self) -> bool:
        groups = [] if (optimizer := self._optimizer()) is None else optimizer.param_groups
        return any(_is_not_zero(group.get("lr", 1)) for group in groups)

    def close(self) -> None:
        self._handle.remove()
        self._attempted = lambda: None  # type: ignore[assignment]


def _is_not_zero(rate: Any) -> bool:
    """Whether a learning rate is another than 0, or several of them are."""
    return bool((rate != 0).any() if hasattr(rate, "any") else rate != 0)


_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[StepAttempts]]] = (
    weakref.WeakKeyDictionary()
)


@contextmanager
def attempt_of(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside it ``optimizer`` steps, or a scaler finds that it cannot."""
    watchers = [watcher() for watcher in _watched.get(optimizer, [])]
    before = [(watcher, watcher.count) for watcher in watchers if watcher is not None]
    yield
    for watcher, count in before:
        if watcher.count == count:
            watcher()
