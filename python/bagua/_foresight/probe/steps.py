"""Times of a training's steps: compute, and when each gradient is ready."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["Moment", "StepProbe", "StepTimes"]

_WARM_UP = 2  # steps that are not measured
_WATCHED = 3  # steps with hooks on the parameters, which slow them down
_PLAIN = 8  # steps without, whose median counts


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step without communication.

    Attributes:
        compute: of the whole step.
        optimizer: of these, after the last gradient.
        ready: from the start of the step to the gradient of a parameter, by its name.
        spread: standard deviation of the whole over its median.
    """

    compute: float
    optimizer: float
    ready: Mapping[str, float]
    spread: float


class Moment:
    """The time of its making, as the device gets there."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.Event | None = None
        self._at = 0.0
        if device.type == "cpu":
            self._at = time.perf_counter()
        else:
            self._event = torch.Event(device, enable_timing=True)
            self._event.record()

    def seconds_since(self, other: Moment) -> float:
        """From an earlier moment of the same device to this one."""
        if self._event is None or other._event is None:
            return self._at - other._at
        self._event.synchronize()
        return float(other._event.elapsed_time(self._event)) / 1e3


class StepProbe:
    """Measures consecutive steps of a training, whose gradients are not accumulated.

    Call :meth:`step_begins` at the start of each step: a step ends where the next begins, so that
    loading of data counts. Hooks on the parameters are there in a few steps only.

    Args:
        named: parameters by name, on one device.
        blocked: seconds for which communication has blocked the training so far. None: there is no
            communication.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        blocked: Callable[[], float] | None = None,
    ) -> None:
        self._named = list(named)
        self._device = self._named[0][1].device if self._named else torch.device("cpu")
        self._blocked = blocked or (lambda: 0.0)
        self._handles: list[RemovableHandle] = []
        self._begins: list[tuple[Moment, float]] = []
        self._ready: list[dict[str, Moment]] = []

    @property
    def done(self) -> bool:
        """Whether enough steps have been measured."""
        return len(self._begins) > _WARM_UP + _WATCHED + _PLAIN

    def step_begins(self) -> None:
        """A step begins, and the one before has ended."""
        if self.done:
            return
        steps = len(self._begins)
        if steps == _WARM_UP:
            self._watch()
        elif steps == _WARM_UP + _WATCHED:
            self.close()
        if _WARM_UP <= steps < _WARM_UP + _WATCHED:
            self._ready.append({})
        self._begins.append((Moment(self._device), self._blocked()))

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def times(self) -> StepTimes:
        """The figures, once :attr:`done`; parameters without gradients are missing in ``ready``."""
        periods = []
        for (begin, before), (end, after) in zip(self._begins, self._begins[1:], strict=False):
            periods.append(max(1e-9, end.seconds_since(begin) - (after - before)))
        plain = periods[_WARM_UP + _WATCHED :]
        compute = statistics.median(plain)
        shares: dict[str, list[float]] = {}
        for number, moments in enumerate(self._ready):
            begin, whole = self._begins[_WARM_UP + number][0], periods[_WARM_UP + number]
            for name, moment in moments.items():
                share = min(1.0, max(0.0, moment.seconds_since(begin) / whole))
                shares.setdefault(name, []).append(share)
        ready = {name: compute * statistics.median(seen) for name, seen in shares.items()}
        last = max(ready.values(), default=compute)
        return StepTimes(compute, compute - last, ready, statistics.pstdev(plain) / compute)

    def _watch(self) -> None:
        this = weakref.ref(self)
        for name, parameter in self._named:

            def note(_: torch.Tensor, name: str = name) -> None:
                owner = this()
                if owner is not None and owner._ready:
                    owner._ready[-1][name] = Moment(owner._device)

            self._handles.append(parameter.register_post_accumulate_grad_hook(note))
