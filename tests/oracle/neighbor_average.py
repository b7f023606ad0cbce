"""Averaging over a graph, from the formulas and nothing else.

    w_ij = 1 / (1 + max(d_i, d_j)) for neighbours, w_ii = 1 - the rest of the row
    x <- W x

Nothing here calls the library. A graph is a list over ranks of lists of neighbours.
"""

import itertools

import torch


def all_graphs(size):
    """Every undirected graph on `size` labelled ranks: 2 to the number of pairs."""
    pairs = list(itertools.combinations(range(size), 2))
    for chosen in itertools.product([False, True], repeat=len(pairs)):
        edges = [pair for pair, taken in zip(pairs, chosen, strict=True) if taken]
        yield [sorted({*sum(edges_of(edges, rank), ())} - {rank}) for rank in range(size)]


def edges_of(edges, rank):
    return [edge for edge in edges if rank in edge]


def metropolis(graph):
    """W as an f64 matrix."""
    size = len(graph)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in graph[i]:
            matrix[i, j] = 1 / (1 + max(len(graph[i]), len(graph[j])))
        matrix[i, i] = 1 - matrix[i].sum()
    return matrix


def average(matrix, values):
    """W x in f64; `values` holds one tensor per rank."""
    stacked = torch.stack([value.double() for value in values])
    return list((matrix @ stacked.reshape(len(values), values[0].numel())).view_as(stacked))
