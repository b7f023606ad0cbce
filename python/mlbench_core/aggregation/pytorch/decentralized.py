"""Aggregation with the neighbours of a rank in a graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.group.process_group import BaguaProcessGroup

from mlbench_core.aggregation.pytorch._mixing import exchange_neighbors, metropolis_weights
from mlbench_core.aggregation.pytorch.aggregation import (
    Aggregation,
    Denominator,
    canonical_op,
)

__all__ = ["DecentralizedAggregation"]


class DecentralizedAggregation(Aggregation):
    """Replaces each rank's tensors by a weighted mean of its own and its neighbours'.

    x_i <- sum of w_ij x_j over the rank and its neighbours, with Metropolis weights
    w_ij = 1 / (1 + max(d_i, d_j)): 1 / (d + 1) where all ranks have d neighbours. The mean over all
    ranks is kept on any graph; ranks come to agree if the graph is connected. ``avg_world``
    (``avg``) is the only operation.

    All ranks construct and call it, those without neighbours too. The first aggregation exchanges
    the lists.

    Args:
        rank: of this process in the group.
        neighbors: ranks of its neighbours, in any order; one that comes twice counts once.
        use_cuda: communicate CUDA tensors as they are; otherwise through CPU memory.
        process_group: default: all ranks.

    Raises:
        ValueError: a rank is its own neighbour or negative; at the first aggregation, on every
            rank, if on one of them ``rank`` is not the process's, a neighbour is outside of the
            group, or lists another that does not list it.
        NotImplementedError: at an aggregation: an operation other than ``avg_world``.
    """

    def __init__(
        self,
        rank: int,
        neighbors: Iterable[int],
        use_cuda: bool = False,
        *,
        process_group: BaguaProcessGroup | None = None,
    ) -> None:
        unique = sorted({int(neighbor) for neighbor in neighbors})
        # Checks
        if rank in unique:
            raise ValueError(f"rank {rank} is in its own list of neighbours {unique}: leave it out")
        if rank < 0 or (unique and unique[0] < 0):
            raise ValueError(f"ranks must not be negative: rank={rank}, neighbors={unique}")

        super().__init__(use_cuda=use_cuda, process_group=process_group)
        self.rank = rank
        self.neighbors = unique
        self._graph: list[list[int]] = []
        self._scratch = _C.Scratch()

    def _check(self, op: str, denom: Denominator) -> None:
        if canonical_op(op) != "avg_world":
            raise NotImplementedError(
                f"{type(self).__name__} has no op={op!r}; 'avg_world' (or 'avg') is the mean over "
                "a rank and its neighbours"
            )

    def _check_group(self, connections: Connections) -> None:
        mistake = ""
        outside = [neighbor for neighbor in self.neighbors if neighbor >= connections.size]
        if self.rank != connections.rank:
            mistake = f"it was made with rank={self.rank}, but the process is {connections.rank}"
        elif outside:
            mistake = f"its neighbours {outside} are not in the group of {connections.size} rank(s)"
        self._graph = exchange_neighbors(connections, self.neighbors, mistake)

    def _describe(self, op: str, denom: Denominator) -> list[str]:
        return [f"op {canonical_op(op)}"]

    def _refusal(self, dtype: torch.dtype, op: str) -> str:
        return "" if dtype.is_floating_point else f"{dtype} has no mean; convert it first"

    def _agg(self, data: torch.Tensor, op: str, denom: Denominator = None) -> torch.Tensor:
        # Checks
        self._check(op, denom)

        communicator = self._communicator("data", data.device)
        own_weight, neighbors = metropolis_weights(self.rank, self._graph)
        average = _C.NeighborAverage(communicator, own_weight, neighbors, self._scratch)
        average.run(data.view(-1), bucket=type(self).__name__)
        return data
