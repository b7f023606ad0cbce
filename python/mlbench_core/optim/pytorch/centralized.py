"""Optimizers whose ranks aggregate with all others: mlbench-core's documented address."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.nn.utils import clip_grad_norm_

from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.aggregation.pytorch.centralized import (
    AVG_WORLD,
    AllReduceAggregation,
)
from mlbench_core.optim.pytorch._aggregating import AggregatingOptimizer, Closure, Tracker
from mlbench_core.optim.pytorch._arguments import chosen_average, needed
from mlbench_core.optim.pytorch._power_sgd import PowerSGD
from mlbench_core.optim.pytorch._sparsified import CentralizedSparsifiedSGD

__all__ = [
    "CentralizedAdam",
    "CentralizedSGD",
    "CentralizedSparsifiedSGD",
    "CustomCentralizedOptimizer",
    "GenericCentralizedOptimizer",
    "PowerSGD",
]


class GenericCentralizedOptimizer(AggregatingOptimizer):
    """Averages gradients, or with ``agg_grad=False`` weights, over all ranks by an all_reduce.

    With gradients, one step of n ranks is one step of torch's optimizer on the joined batch, if
    their batches have one size and the loss is a mean. Ranks hold the same bits after every step.

    A subclass sets :attr:`optimizer` at the end of its constructor. Unlike mlbench-core's, it gives
    all ranks the weights of rank 0 at construction in both cases (there: their average, and only
    for ``agg_grad=False``) and can be copied.

    Args:
        world_size: number of ranks.
        model: the module that is trained.
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.
        by_layer: one message per parameter instead of one per dtype.
        divide_before: divide before the sum, so that half precision does not overflow.
        agg_grad: aggregate gradients before the update; otherwise weights after it.

    Raises:
        ValueError: an argument is missing, or ``world_size`` is not the number of ranks.
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: torch.nn.Module | None = None,
        use_cuda: bool = False,
        by_layer: bool = False,
        divide_before: bool = False,
        agg_grad: bool = True,
    ) -> None:
        # Checks
        owner = type(self).__name__
        size = needed(world_size, "world_size", owner)
        module = needed(model, "model", owner)

        super().__init__(
            module,
            partial(AllReduceAggregation, size, divide_before, use_cuda),
            world_size=size,
            op=AVG_WORLD,
            agg_grad=agg_grad,
            by_layer=by_layer,
        )


class CentralizedSGD(GenericCentralizedOptimizer):
    """``torch.optim.SGD`` on gradients (or followed by weights) averaged over all ranks.

    Args:
        world_size: number of ranks.
        model: the module that is trained.
        lr: learning rate.
        momentum: momentum factor.
        dampening: dampening for momentum.
        weight_decay: weight decay (L2 penalty).
        nesterov: Nesterov momentum.
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.
        by_layer: one message per parameter instead of one per dtype.
        agg_grad: aggregate gradients before the update; otherwise weights after it.

    Raises:
        ValueError: ``world_size``, ``model`` or ``lr`` is missing or out of range.
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: torch.nn.Module | None = None,
        lr: float | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
    ) -> None:
        rate = needed(lr, "lr", type(self).__name__)
        super().__init__(world_size, model, use_cuda, by_layer, agg_grad=agg_grad)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=rate,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )


class CentralizedAdam(GenericCentralizedOptimizer):
    """``torch.optim.Adam`` on gradients (or followed by weights) averaged over all ranks.

    ``lr`` has the default that mlbench-core documents and does not have.

    Args:
        world_size: number of ranks.
        model: the module that is trained.
        lr: learning rate.
        betas: coefficients of the running averages of the gradient and its square.
        eps: added to the denominator.
        weight_decay: weight decay (L2 penalty).
        amsgrad: the variant of "On the Convergence of Adam and Beyond".
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.
        by_layer: one message per parameter instead of one per dtype.
        agg_grad: aggregate gradients before the update; otherwise weights after it.

    Raises:
        ValueError: ``world_size`` or ``model`` is missing, or an argument is out of range.
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: torch.nn.Module | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
    ) -> None:
        super().__init__(world_size, model, use_cuda, by_layer, agg_grad=agg_grad)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


class CustomCentralizedOptimizer(GenericCentralizedOptimizer):
    """Any optimizer of torch, with clipping and a denominator of the caller's.

    Unlike mlbench-core's it hands ``denom`` on with ``agg_grad=False`` too, and clips there as
    well: the gradients that each rank's own update takes.

    Args:
        model: the module that is trained.
        world_size: number of ranks.
        optimizer: steps; over parameters of ``model``.
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.
        by_layer: one message per parameter instead of one per dtype.
        agg_grad: aggregate gradients before the update; otherwise weights after it.
        grad_clip: largest L2 norm of the gradients that an update takes.
        average_world: divide sums by the number of ranks.
        average_custom: divide sums by the ``denom`` of each step instead.
        divide_before: divide before the sum, so that half precision does not overflow.

    Raises:
        NotImplementedError: neither average is chosen.
        ValueError: ``world_size`` is not the number of ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        world_size: int,
        optimizer: torch.optim.Optimizer,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
        grad_clip: float = math.inf,
        average_world: bool = False,
        average_custom: bool = False,
        divide_before: bool = False,
    ) -> None:
        # Checks
        mode = chosen_average(average_world, average_custom, "CustomCentralizedOptimizer")

        super().__init__(world_size, model, use_cuda, by_layer, divide_before, agg_grad)
        self.grad_clip = grad_clip
        self.agg_mode = mode
        self.optimizer = optimizer

    def step(  # type: ignore[override]
        self,
        closure: Closure = None,
        tracker: Tracker | None = None,
        denom: Denominator = None,
    ) -> bool:
        """Aggregate, clip and update, or, for weights, clip, update and aggregate.

        Args:
            closure: computes the loss and the gradients.
            tracker: notified of the end of the aggregation and of the update.
            denom: with ``average_custom``: divisor of the sums, equal on all ranks.

        Returns:
            True.

        Raises:
            ValueError: ``denom`` is missing or zero; nothing has been sent or changed.
        """
        self.aggregation._check(self.agg_mode, denom)
        self._step(closure, tracker, denom)
        return True

    def _before_update(self) -> None:
        if self.grad_clip != math.inf:
            clip_grad_norm_(self.model.parameters(), self.grad_clip)
