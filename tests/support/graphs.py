"""Graphs of ranks: ``ring(size)[rank]`` are the neighbours of ``rank``.

Every list is sorted, has each neighbour once and never the rank itself; neighbours are mutual.
"""

from __future__ import annotations

Neighbors = list[list[int]]


def ring(size: int) -> Neighbors:
    """Each rank with the one before and the one after; with two ranks that is the same one."""
    return torus(1, size)


def torus(rows: int, columns: int) -> Neighbors:
    """A grid whose borders meet, rank ``row * columns + column``: up, down, left and right."""
    graph = []
    for rank in range(rows * columns):
        row, column = divmod(rank, columns)
        across = {row * columns + (column + step) % columns for step in (-1, 1)}
        along = {(row + step) % rows * columns + column for step in (-1, 1)}
        graph.append(sorted((across | along) - {rank}))
    return graph


def complete(size: int) -> Neighbors:
    """Each rank with all others."""
    return [[other for other in range(size) if other != rank] for rank in range(size)]


def star(size: int, hub: int = 0) -> Neighbors:
    """The hub is a neighbour of all other ranks, and their only one."""
    others = [rank for rank in range(size) if rank != hub]
    return [others if rank == hub else [hub] for rank in range(size)]
