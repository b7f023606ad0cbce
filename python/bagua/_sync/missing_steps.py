"""Training that steps another optimizer than those given to the wrap, which is an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bagua import BaguaError
from bagua._sync.hooks import LeftBehind

__all__ = ["MissingSteps"]

#: Training forwards with changed parameters and without a step, after which training ends.
_MOST = 20
_SAMPLED_PARAMETERS = 8


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
        self._state = _Counter()
        self.handles: list[RemovableHandle] = []
        for optimizer in optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self._state.begin_step))
            self.handles.append(optimizer.register_step_post_hook(self._state.end_step))

    def _read(self) -> int:
        return sum(parameter._version for parameter in self._sample)

    def at_forward(self) -> None:
        """Count a training forward whose backward communicates.

        Raises:
            BaguaError: too many, without a step of a given optimizer.
        """
        before, self._versions = self._versions, self._read()
        if before == self._versions or self._state.stepping:
            return
        self._state.count += 1
        if self._state.count > _MOST:
            raise BaguaError(
                f"module '{self._module_name}': its parameters have changed before each of "
                f"{_MOST} training forwards, and no optimizer given to with_bagua "
                f"({self._optimizers}) has made a step, so {self._algorithm_name} does not "
                "communicate and the ranks train apart. Give with_bagua the optimizer whose "
                "step() is called: make it before the wrap, or call with_bagua again, on every "
                "rank, with the new one."
            )


class _Counter(LeftBehind):
    """The hooks of the optimizers, which hold no module."""

    def __init__(self) -> None:
        self.count = 0
        self.stepping = False

    def begin_step(self, *_: Any) -> None:
        self.count, self.stepping = 0, True

    def end_step(self, *_: Any) -> None:
        self.count, self.stepping = 0, False
