"""Aggregation with the neighbours of a rank in a graph."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.group.rendezvous import wait_for_keys

from mlbench_core.aggregation.pytorch.aggregation import (
    Aggregation,
    Denominator,
    canonical_op,
)

__all__ = ["DecentralizedAggregation", "metropolis_weights"]


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
        use_cuda: communicate CUDA tensors directly; otherwise through CPU memory.
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
        self._graph = _exchange_neighbors(connections, self.neighbors, mistake)

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


def metropolis_weights(
    rank: int, graph: Sequence[Sequence[int]]
) -> tuple[float, list[tuple[int, float]]]:
    """The own weight and (neighbour, weight) of each neighbour, adding up to 1.

    w_ij = 1 / (1 + max(d_i, d_j)), with d the number of neighbours (L. Xiao, S. Boyd, S.-J. Kim,
    *Distributed average consensus with least-mean-square deviation*, JPDC 67(1), 2007, section 4).
    W is symmetric, so the mean over ranks is kept on any graph. Where all degrees are equal every
    weight is 1 / (d + 1).
    """
    uniform = 1 / (1 + len(graph[rank]))
    weights = [(j, 1 / (1 + max(len(graph[rank]), len(graph[j])))) for j in graph[rank]]
    # A sum of differences: on a regular graph each is zero, and equal weights are equal bits.
    return uniform + sum(uniform - weight for _, weight in weights), weights


def _exchange_neighbors(connections: Connections, own: list[int], mistake: str) -> list[list[int]]:
    """Every rank's neighbours, exchanged once through the store. All ranks call it.

    ``mistake``: the error in this rank's arguments, or empty; all ranks raise it.
    """
    key = f"aggregation/{connections.next_wrap()}/neighbours"
    keys = [f"{key}/{rank}" for rank in range(connections.size)]
    connections.store.set(keys[connections.rank], json.dumps([own, mistake]))
    wait_for_keys(connections.store, keys, connections.timeout)
    answers = [json.loads(connections.store.get(name)) for name in keys]
    for rank, (_, text) in enumerate(answers):
        if text:
            raise ValueError(f"DecentralizedAggregation on rank {rank}: {text}")
    graph = [list(neighbors) for neighbors, _ in answers]
    for rank, neighbors in enumerate(graph):
        for other in neighbors:
            if rank not in graph[other]:
                raise ValueError(
                    f"DecentralizedAggregation: rank {rank} lists {other}, but {other} does not "
                    f"list {rank}; neighbours must be mutual"
                )
    return graph
