"""Optimizers of ``torch.distributed.optim._apply_optimizer_in_backward``.

torch registers a hook per parameter that steps as soon as the gradient is accumulated, which would
be this rank's own. As in torch's DDP those hooks are removed, and the steps are made when the
gradients have been communicated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from bagua._sync.wrapper import Algorithm

__all__ = ["StepsInBackward"]

_TORCHS = "torch.distributed.optim.apply_optimizer_in_backward"


class StepsInBackward:
    """The optimizers that step inside the backward of the parameters ``named``."""

    def __init__(
        self,
        module_name: str,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        algorithm: Algorithm,
    ) -> None:
        self._module_name = module_name
        self._named = list(named)
        self._algorithm = algorithm
        self._parameters: list[torch.nn.Parameter] = []
        self._known = 0  # hooks that there were, of all modules
        self.take_over()

    def take_over(self) -> bool:
        """Remove the hooks of the parameters; whether there are optimizers.

        Raises:
            NotImplementedError: the algorithm must see the optimizer's ``step()``.
        """
        torchs: Any = sys.modules.get(_TORCHS)
        hooks = torchs.param_to_optim_hook_handle_map if torchs is not None else {}
        if len(hooks) == self._known:
            return bool(self._parameters)
        self._known = len(hooks)
        stepping = [(name, p) for name, p in self._named if hasattr(p, "_in_backward_optimizers")]
        if stepping and not self._algorithm.steps_in_backward:
            raise NotImplementedError(
                f"module '{self._module_name}': parameter '{stepping[0][0]}' has an optimizer of "
                f"_apply_optimizer_in_backward, and {type(self._algorithm).__name__} communicates "
                "around the optimizer's step(). Give with_bagua an optimizer whose step() is "
                "called after backward()."
            )
        self._parameters = [p for _, p in stepping]
        for parameter in self._parameters:
            for handle in hooks.get(parameter, []):
                handle.remove()
        return bool(self._parameters)

    def step(self) -> None:
        """Step with every gradient that there is, and drop it."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
            parameter.grad = None

    def close(self) -> None:
        """Forget the parameters. Idempotent."""
        self._named = []
        self._parameters = []
