"""SGD on low-rank gradients."""

from __future__ import annotations

from functools import partial

import torch

from mlbench_core.aggregation.pytorch._power import PowerAggregation
from mlbench_core.aggregation.pytorch.aggregation import Denominator
from mlbench_core.optim.pytorch._aggregating import AggregatingOptimizer, Tracker
from mlbench_core.optim.pytorch._arguments import needed

__all__ = ["PowerSGD"]


class PowerSGD(AggregatingOptimizer):
    """``torch.optim.SGD`` on low-rank gradients with error feedback (PowerSGD, Algorithms 1 and 2).

    Gradients are averaged by ``PowerAggregation``; momentum comes after decompression. Vogels,
    Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", 2019.

    What was not sent yet is part of ``state_dict()``, which mlbench-core's left out. With one rank
    there is nothing to send and gradients are exact.

    Args:
        model: the module that is trained.
        lr: learning rate.
        momentum: momentum factor.
        weight_decay: weight decay (L2 penalty).
        dampening: dampening for momentum.
        nesterov: Nesterov momentum.
        average_world: must be True.
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.
        by_layer: one aggregation per parameter.
        reuse_query: warm start: the power iteration begins where the last one ended.
        world_size: number of ranks.
        rank: of the approximation.

    Raises:
        NotImplementedError: ``average_world=False``.
        ValueError: ``model`` or ``lr`` is missing, ``world_size`` is not the number of ranks, or an
            argument is out of range.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        lr: float | None = None,
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
        reuse_query: bool = False,
        world_size: int = 1,
        rank: int = 1,
    ) -> None:
        # Checks
        module = needed(model, "model", "PowerSGD")
        rate = needed(lr, "lr", "PowerSGD")
        if not average_world:
            raise NotImplementedError("PowerSGD averages gradients only: leave average_world=True")

        super().__init__(
            module,
            partial(PowerAggregation, module, use_cuda, reuse_query, world_size, rank),
            world_size=world_size,
            op="avg_world",
            agg_grad=True,
            by_layer=by_layer,
        )
        self.world_size = world_size
        self.optimizer = torch.optim.SGD(
            module.parameters(),
            lr=rate,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )

    def _aggregate(self, tracker: Tracker | None, denom: Denominator) -> None:
        if self.world_size > 1:
            super()._aggregate(tracker, denom)
