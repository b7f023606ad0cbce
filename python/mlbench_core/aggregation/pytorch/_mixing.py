"""Weights of the neighbours, and a check that neighbours list each other."""

from __future__ import annotations

import json
from collections.abc import Sequence

from bagua._core.group.connections import Connections

__all__ = ["exchange_neighbors", "metropolis_weights"]


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


def exchange_neighbors(connections: Connections, own: list[int], mistake: str) -> list[list[int]]:
    """Every rank's neighbours, exchanged once through the store. All ranks call it.

    Args:
        mistake: the error in this rank's arguments, or empty.

    Raises:
        ValueError: on every rank, if one of them made a mistake or a list is not mutual.
    """
    key = f"aggregation/{connections.next_wrap()}/neighbours"
    keys = [f"{key}/{rank}" for rank in range(connections.size)]
    connections.store.set(keys[connections.rank], json.dumps([own, mistake]))
    connections.store.wait(keys, connections.timeout)
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
                    f"list {rank}; neighbours must be mutual (see "
                    "mlbench_core.aggregation.pytorch.topology)"
                )
    return graph
