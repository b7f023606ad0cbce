"""SparsifiedSGD over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from mlbench_core.aggregation.pytorch._sparsified import SparsifiedAggregation
from mlbench_core.optim.pytorch._begin import begin_together
from mlbench_core.optim.pytorch._memory import memory_of, restore_memory
from mlbench_core.optim.pytorch.optim import SparsifiedSGD

__all__ = ["CentralizedSparsifiedSGD"]


class CentralizedSparsifiedSGD(SparsifiedSGD):
    """SGD by the mean of the ranks' sparse steps, with a memory on each (Mem-SGD, Algorithm 2).

    Per rank and parameter: m <- m + lr * gradient; ``sparse_grad_size`` coordinates of m leave it
    and are sent; all ranks subtract the mean over ranks of what was sent. Ranks hold the same bits
    after every step. Stich, Cordonnier, Jaggi: "Sparsified SGD with Memory", 2018.

    What mlbench-core's did instead: besides what :class:`SparsifiedSGD` lists, it worked for
    parameters of one row only, sent indices as float32, never sent the last coordinates when
    ``sparse_grad_size`` does not divide their number, and took contiguous random blocks for
    ``random_sparse=False``, where this takes the largest. All ranks begin with the weights of rank
    0. The memory is in ``state_dict()["aggregation"]``, each rank's its own.

    Args:
        params: parameters or groups of them, of any shapes.
        lr: learning rate.
        weight_decay: weight decay (L2 penalty), not sparsified.
        sparse_grad_size: number of coordinates per parameter, rank and step; all, where that would
            not take fewer bytes.
        random_sparse: random coordinates, the same on all ranks, instead of each rank's largest.
        world_size: number of ranks.
        average_world: subtract the mean over ranks; otherwise the sum.
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.

    Raises:
        ValueError: an argument is missing or out of range, or ``world_size`` is not the number of
            ranks.
    """

    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float | None = None,
        weight_decay: float = 0,
        sparse_grad_size: int = 10,
        random_sparse: bool = False,
        world_size: int = 1,
        average_world: bool = True,
        *,
        use_cuda: bool = False,
    ) -> None:
        super().__init__(params, lr, weight_decay, sparse_grad_size, random_sparse=random_sparse)
        self.average_world = average_world
        self.world_size = world_size
        self._recipe = partial(
            SparsifiedAggregation,
            use_cuda=use_cuda,
            k=sparse_grad_size,
            random_sparse=random_sparse,
        )
        self.aggregation = self._recipe(self._carrier())
        named = dict(self._carrier().named_parameters())
        begin_together(self.aggregation, world_size, named, type(self).__name__)

    def _sparse(self, steps: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        carrier = self._carrier()
        for p, step in zip(carrier.parameters(), steps, strict=True):
            p.grad = step
        self.aggregation.agg_grad(by_layer=True)(carrier, "avg_world")
        means = [p.grad for p in carrier.parameters()]
        if not self.average_world:
            return [None if mean is None else mean * self.world_size for mean in means]
        return means

    def _carrier(self) -> torch.nn.ParameterList:
        """A module of the parameters' own memory, whose gradients are free to carry the steps."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.ParameterList(torch.nn.Parameter(p.detach()) for p in parameters)

    def state_dict(self) -> dict[str, Any]:
        """The state as of torch, and the residuals under ``"aggregation"``."""
        return super().state_dict() | {"aggregation": memory_of(self.aggregation)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: something does not fit, or the memory is missing.
        """
        state = dict(state_dict)
        restore_memory(self.aggregation, state.pop("aggregation", None), type(self).__name__)
        super().load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            "average_world": self.average_world,
            "world_size": self.world_size,
            "_recipe": self._recipe,
            "memory of the aggregation": memory_of(self.aggregation),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        memory = state.pop("memory of the aggregation", None)
        super().__setstate__(state)
        if "_recipe" in state:  # a copy; torch's load_state_dict passes this way too
            self.aggregation = self._recipe(self._carrier())
            restore_memory(self.aggregation, memory, type(self).__name__)
