"""Training in half precision with master weights in single precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.centralized import (
    AllReduceAggregation,
    AllReduceAggregationHVD,
)
from mlbench_core.optim.pytorch._arguments import chosen_average
from mlbench_core.optim.pytorch._begin import begin_together

__all__ = ["DynamicLossScaler", "FP16Optimizer"]


class DynamicLossScaler:
    """Factor of a loss, so that gradients in half precision do not vanish.

    Micikevicius et al.: "Mixed Precision Training", 2018, section 3.2.

    Args:
        init_scale: the first scale.
        scale_factor: divisor of the scale after an overflow, and factor after
            ``scale_window`` updates without one.
        scale_window: see above.
        max_scale: it does not grow beyond, if given.

    Attributes:
        loss_scale: the current scale.
    """

    def __init__(
        self,
        init_scale: float = 2.0**15,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        max_scale: float | None = None,
    ) -> None:
        self.loss_scale = init_scale
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.max_scale = max_scale
        self._clean = 0

    def update_scale(self, overflow: bool) -> None:
        """Take note of one update that overflowed, or did not."""
        self._clean = 0 if overflow else self._clean + 1
        if overflow:
            self.loss_scale /= self.scale_factor
        elif self._clean % self.scale_window == 0:
            self.loss_scale *= self.scale_factor
            if self.max_scale is not None:
                self.loss_scale = min(self.loss_scale, self.max_scale)

    @staticmethod
    def has_overflow(grad_norm: torch.Tensor | float) -> bool:
        """Whether a norm is infinite or not a number."""
        return not math.isfinite(float(grad_norm))

    def state_dict(self) -> dict[str, float]:
        """The scale and its age."""
        return {"loss_scale": self.loss_scale, "clean_updates": self._clean}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.loss_scale = state_dict["loss_scale"]
        self._clean = int(state_dict["clean_updates"])


class FP16Optimizer:
    """Trains a module in half precision over all ranks; its weights live on in single precision.

    A step: 1. all_reduce the scaled half-precision gradients; 2. copy them into one float32
    gradient, divided by the loss scale; 3. if its norm is finite, clip it, update
    :attr:`fp32_params` by the optimizer and copy them into the module; otherwise skip. Ranks see
    the same sums, so all of them skip, or none.

    Set the optimizer by ``set_optimizer(torch.optim.SGD([this.fp32_params], ...))``; schedulers of
    learning rates take that one. All ranks begin with the weights of rank 0. A parameter without
    gradient on every rank counts as zero.

    Args:
        fp16_model: a module of half precision.
        world_size: number of ranks.
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.
        use_horovod: communicate by Horovod.
        by_layer: one message per parameter instead of one per dtype.
        grad_clip: largest L2 norm of the unscaled gradients.
        init_scale: first loss scale.
        scale_factor: by which it shrinks and grows.
        scale_window: updates without overflow after which it grows.
        max_scale: it does not grow beyond, if given.
        min_scale: it must not shrink to this.
        average_world: divide sums by the number of ranks.
        average_custom: divide sums by the ``denom`` of each step instead.
        divide_before: divide before the sum, so that it does not overflow.

    Attributes:
        fp32_params: all trained weights, flat.
        optimizer: the argument of ``set_optimizer``.

    Raises:
        NotImplementedError: neither average is chosen.
        ValueError: ``world_size`` is not the number of ranks, or nothing is to be trained.
    """

    def __init__(
        self,
        fp16_model: torch.nn.Module,
        world_size: int,
        use_cuda: bool = False,
        use_horovod: bool = False,
        by_layer: bool = False,
        grad_clip: float = math.inf,
        init_scale: float = 1024,
        scale_factor: float = 2,
        scale_window: int = 128,
        max_scale: float | None = None,
        min_scale: float = 1e-4,
        average_world: bool = False,
        average_custom: bool = False,
        divide_before: bool = False,
    ) -> None:
        # Checks
        self.agg_mode = chosen_average(average_world, average_custom, "FP16Optimizer")
        if not any(p.requires_grad for p in fp16_model.parameters()):
            raise ValueError("no parameter of the model requires a gradient")

        kind = AllReduceAggregationHVD if use_horovod else AllReduceAggregation
        self.fp16_model = fp16_model
        self.aggregation = kind(world_size, divide_before, use_cuda)
        named = dict(fp16_model.named_parameters()) | dict(fp16_model.named_buffers())
        begin_together(self.aggregation, world_size, named, type(self).__name__)
        self.agg = self.aggregation.agg_grad(by_layer=by_layer)
        self.fp32_params = torch.nn.Parameter(torch.cat(self._flat()).float())
        self.loss_scaler = DynamicLossScaler(init_scale, scale_factor, scale_window, max_scale)
        self.min_scale = min_scale
        self.grad_clip = grad_clip
        self.optimizer: torch.optim.Optimizer | None = None

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Set what updates :attr:`fp32_params`."""
        self.optimizer = optimizer

    def backward_loss(self, loss: torch.Tensor) -> None:
        """Backward of the loss times its scale."""
        (loss * self.loss_scaler.loss_scale).backward()

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        multiplier: float = 1,
        denom: Denominator = None,
    ) -> bool:
        """Aggregate, unscale, clip and update.

        Args:
            closure: computes the gradients, by :meth:`backward_loss`; called first.
            multiplier: gradients are divided by this as well.
            denom: with ``average_custom``: divisor of the sums, equal on all ranks.

        Returns:
            Whether the weights were updated: not after an overflow.

        Raises:
            FloatingPointError: the loss scale shrank to ``min_scale``.
            ValueError: there is no optimizer, or ``denom`` is missing or zero.
        """
        # Checks
        if self.optimizer is None:
            raise ValueError("FP16Optimizer has no optimizer: call set_optimizer first")

        if closure is not None:
            with torch.enable_grad():
                closure()
        self.agg(self.fp16_model, self.agg_mode, denom)
        gradient = torch.cat(self._flat(gradients=True)).float()
        self.fp32_params.grad = gradient.div_(self.loss_scaler.loss_scale * multiplier)
        norm = clip_grad_norm_([self.fp32_params], self.grad_clip)
        overflow = self.loss_scaler.has_overflow(norm)
        self.loss_scaler.update_scale(overflow)
        if not overflow:
            self.optimizer.step()
            self._give_weights_back()
        elif self.loss_scaler.loss_scale <= self.min_scale:
            raise FloatingPointError(
                f"gradients still overflow at a loss scale of {self.loss_scaler.loss_scale:g}, "
                f"which is not above min_scale={self.min_scale:g}: check the loss and the data"
            )
        return not overflow

    def zero_grad(self) -> None:
        """Reset the gradients of the module."""
        self.fp16_model.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The weights in single precision, the optimizer's state and the loss scale."""
        return {
            "fp32_params": self.fp32_params.detach(),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "loss_scaler": self.loss_scaler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, the module's weights included."""
        with torch.no_grad():
            self.fp32_params.copy_(state_dict["fp32_params"])
        self._give_weights_back()
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state_dict["optimizer"])
        self.loss_scaler.load_state_dict(state_dict["loss_scaler"])

    def _flat(self, gradients: bool = False) -> list[torch.Tensor]:
        trained = [p for p in self.fp16_model.parameters() if p.requires_grad]
        if not gradients:
            return [p.detach().flatten() for p in trained]
        return [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]

    @torch.no_grad()
    def _give_weights_back(self) -> None:
        trained = [p for p in self.fp16_model.parameters() if p.requires_grad]
        parts = self.fp32_params.split([p.numel() for p in trained])
        for p, part in zip(trained, parts, strict=True):
            p.copy_(part.view_as(p))
