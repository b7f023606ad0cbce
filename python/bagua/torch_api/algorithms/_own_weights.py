"""What the algorithms have in common whose ranks hold weights of their own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua import BaguaError
from bagua.torch_api.algorithms.base import AlgorithmImpl, WrappedModule

__all__ = ["OwnWeightsImpl"]


class OwnWeightsImpl(AlgorithmImpl):
    """Weights travel instead of gradients, and stay as they are from forward to backward.

    An iteration is a forward and a backward outside ``no_sync()``.
    """

    broadcast_buffers = False
    ranks_agree = False
    opens_at_forward = True
    steps_in_backward = False
    _between_forward_and_backward = False

    def register_weights(self, bagua_ddp: WrappedModule) -> list[torch.Tensor]:
        """All parameters that are trained, as the tensors to communicate."""
        return [
            parameter.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)  # type: ignore[attr-defined]
            for name, parameter in bagua_ddp.bagua_build_params()
        ]

    def mark_weights(self, bagua_ddp: WrappedModule) -> None:
        """Tell the engine that all weights may be sent."""
        for bucket in bagua_ddp.bagua_buckets:
            for tensor in bucket.tensors:
                tensor.bagua_mark_communication_ready()  # type: ignore[attr-defined]

    def init_backward_hook(
        self, bagua_ddp: WrappedModule
    ) -> Callable[[str, torch.nn.Parameter], None]:
        return lambda parameter_name, parameter: None

    def check_step(self, bagua_ddp: WrappedModule, danger: str) -> None:
        """Refuse an optimizer's step inside an iteration; ``danger`` completes "..., ".

        Raises:
            BaguaError: a training forward has begun and its backward has not ended.
        """
        if self._between_forward_and_backward:
            raise BaguaError(
                f"module '{bagua_ddp.bagua_module_name}': optimizer.step() came between a training "
                f"forward and the end of its backward, {danger}. Run other forwards in eval() or "
                "under no_grad(), compute the loss from tensors that forward returns, and call "
                "backward() without inputs=."
            )
