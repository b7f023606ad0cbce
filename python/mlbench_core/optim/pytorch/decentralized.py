"""Optimizers whose ranks communicate with neighbours only: mlbench-core's documented address."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from mlbench_core.optim.pytorch._aggregating import AggregatingOptimizer
from mlbench_core.optim.pytorch._arguments import needed

__all__ = ["DecentralizedSGD"]


class DecentralizedSGD(AggregatingOptimizer):
    """``torch.optim.SGD`` on each rank's own gradients, then weights averaged with neighbours.

    x_i <- sum of w_ij (x_j - lr v_j) over the rank and its neighbours ("adapt, then combine"), with
    the weights of ``DecentralizedAggregation``, which keep the mean over all ranks on any graph:
    the mean moves as by SGD on the mean of the ranks' gradients. Lian et al.: "Can Decentralized
    Algorithms Outperform Centralized Algorithms?", 2017, with that order.

    All ranks begin with the weights of rank 0. Unlike mlbench-core's, rank 0 can construct it.

    Args:
        rank: of this process.
        neighbors: ranks of its neighbours, in any order; one that comes twice counts once.
        model: the module that is trained.
        lr: learning rate.
        momentum: momentum factor.
        dampening: dampening for momentum.
        weight_decay: weight decay (L2 penalty).
        nesterov: Nesterov momentum.
        average_world: must be True.
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.
        by_layer: one message per parameter and neighbour instead of one per dtype.

    Raises:
        NotImplementedError: ``average_world=False``.
        ValueError: ``rank``, ``neighbors``, ``model`` or ``lr`` is missing or out of range, or, on
            every rank, the graph is none: see ``DecentralizedAggregation``.
    """

    def __init__(
        self,
        rank: int | None = None,
        neighbors: Iterable[int] | None = None,
        model: torch.nn.Module | None = None,
        lr: float | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
    ) -> None:
        # Checks
        own = needed(rank, "rank", "DecentralizedSGD")
        others = list(needed(neighbors, "neighbors", "DecentralizedSGD"))
        module = needed(model, "model", "DecentralizedSGD")
        rate = needed(lr, "lr", "DecentralizedSGD")
        if not average_world:
            raise NotImplementedError(
                "DecentralizedSGD averages weights only: leave average_world=True"
            )

        super().__init__(
            module,
            partial(DecentralizedAggregation, own, others, use_cuda),
            op="avg_world",
            agg_grad=False,
            by_layer=by_layer,
        )
        self.optimizer = torch.optim.SGD(
            module.parameters(),
            lr=rate,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )
