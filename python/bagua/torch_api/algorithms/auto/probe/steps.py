"""Times of the steps in which a training is measured, and its gradients."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

from bagua._foresight.probe.steps import Moment

__all__ = ["GradientSample", "Gradients", "StepTimes"]

#: Elements of gradients that are copied; what comes later in backward is left out.
_MOST_ELEMENTS = 8 * 1024**2
#: Elements of one gradient that are: its first rows.
_MOST_OF_ONE = 1024**2


class StepTimes:
    """Wall-clock times of consecutive steps: forward begins, backward ends, forward begins, …

    Attributes:
        forward: when the last forward began; 0: none since :meth:`restart`.
    """

    def __init__(self) -> None:
        self.forward = 0.0
        self._ended = 0.0
        self._whole: list[float] = []
        self._inside: list[float] = []
        self._after: list[float] = []
        self._left_out = 0

    def restart(self, leave_out: int = 0) -> None:
        """Forget the times so far, and those of the next ``leave_out`` steps."""
        self.forward = self._ended = 0.0
        self._whole, self._inside, self._after = [], [], []
        self._left_out = leave_out

    def forward_begins(self) -> None:
        """Note the begin of a step; a forward that continues a step changes nothing."""
        if self.forward:
            return
        self.forward = time.perf_counter()
        if self._ended:
            self._after.append(self.forward - self._ended)

    def backward_ended(self, exposed: float) -> None:
        """Note the end of a backward that waited ``exposed`` seconds for communication."""
        now = time.perf_counter()
        if self._left_out:
            self._left_out -= 1
        elif self.forward:
            if self._ended:
                self._whole.append(now - self._ended)
            self._inside.append(max(0.0, now - self.forward - exposed))
        self.forward, self._ended = 0.0, now

    @property
    def steps(self) -> int:
        """Number of whole steps, from the end of one backward to the next."""
        return len(self._whole)

    def whole(self) -> float:
        """Seconds of a step, the median; infinity without any."""
        return statistics.median(self._whole) if self._whole else float("inf")

    def compute(self) -> tuple[float, float]:
        """Seconds of forward and backward without communication, and of the rest of a step."""
        inside = statistics.median(self._inside) if self._inside else 0.0
        return inside, statistics.median(self._after) if self._after else 0.0


class GradientSample:
    """This rank's gradients of one step, in f32, and when each was there.

    Attributes:
        values: by name of the parameter, in the order of backward, copied before communication;
            of large ones the first rows.
    """

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self._moments: dict[str, Moment] = {}
        self._begin: Moment | None = None
        self._room = _MOST_ELEMENTS

    def ready(self) -> dict[str, float]:
        """Seconds from the begin of the forward, by name of the parameter."""
        if self._begin is None:
            return {}
        return {name: at.seconds_since(self._begin) for name, at in self._moments.items()}

    def note(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or gradient.is_complex():
            return
        self._moments[name] = Moment(parameter.device)
        if gradient.dim() > 0:
            gradient = gradient[: max(1, _MOST_OF_ONE * len(gradient) // max(1, gradient.numel()))]
        if gradient.numel() <= self._room:
            self._room -= 0 if name in self.values else gradient.numel()
            self.values[name] = gradient.detach().float().clone()

    def begin(self, device: torch.device) -> None:
        self.values, self._moments, self._room = {}, {}, _MOST_ELEMENTS
        self._begin = Moment(device)


class Gradients:
    """Hooks that take a :class:`GradientSample` of every step, until they are removed."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.sample = GradientSample()
        self._device = named[0][1].device if named else torch.device("cpu")
        this = weakref.ref(self)
        self._handles: list[RemovableHandle] = []
        for name, parameter in named:

            def note(p: torch.Tensor, name: str = name) -> None:
                if (owner := this()) is not None:
                    owner.sample.note(name, p)

            self._handles.append(parameter.register_post_accumulate_grad_hook(note))

    def step_begins(self) -> None:
        """Begin a new sample."""
        self.sample.begin(self._device)

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
