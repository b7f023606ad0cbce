"""Optimizers of ``torch.distributed.optim._apply_optimizer_in_backward``.

torch registers a hook per parameter that steps as soon as the gradient is accumulated, which would
be this rank's own. As in torch's DDP those hooks are removed at the wrap, and the steps are made
when the gradients have been communicated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.torch_api.algorithms.base import AlgorithmImpl

__all__ = ["StepsInBackward"]


class StepsInBackward:
    """The optimizers that step inside the backward of the parameters ``named``."""

    def __init__(
        self,
        module_name: str,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        algorithm: AlgorithmImpl,
    ) -> None:
        """Remove the hooks.

        Raises:
            NotImplementedError: the algorithm must see the optimizer's ``step()``.
        """
        names = [name for name, p in named if hasattr(p, "_in_backward_optimizers")]
        self._parameters = [p for _, p in named if hasattr(p, "_in_backward_optimizers")]
        if not self._parameters:
            return
        if not algorithm.steps_in_backward:
            raise NotImplementedError(
                f"module '{module_name}': parameter '{names[0]}' has an optimizer of "
                f"_apply_optimizer_in_backward, and {type(algorithm).__name__} communicates around "
                "the optimizer's step(). Give with_bagua an optimizer whose step() is called after "
                "backward()."
            )
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map,
        )

        for parameter in self._parameters:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def step(self) -> None:
        """Step with every gradient that there is, and drop it."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            for optimizer in parameter._in_backward_optimizers:
                optimizer.step()
            parameter.grad = None

    def close(self) -> None:
        """Forget the parameters. Idempotent."""
        self._parameters = []
