"""Graphs of ranks, for every size up to 16."""

import pytest
from mlbench_core.aggregation.pytorch import topology

SIZES = range(1, 17)


def factorings(size):
    return [(rows, size // rows) for rows in range(1, size + 1) if size % rows == 0]


def graphs(size):
    yield from (("torus", topology.torus(*shape)) for shape in factorings(size))
    yield from (("star", topology.star(size, hub)) for hub in range(size))
    yield "ring", topology.ring(size)
    yield "complete", topology.complete(size)


def reachable(graph):
    found, waiting = {0}, [0]
    while waiting:
        new = set(graph[waiting.pop()]) - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize("size", SIZES)
def test_neighbours_are_mutual_others_once_and_all_are_connected(size):
    for name, graph in graphs(size):
        assert len(graph) == size
        for rank, neighbors in enumerate(graph):
            assert neighbors == sorted(set(neighbors) - {rank}), (name, rank)
            assert all(rank in graph[neighbor] for neighbor in neighbors), (name, rank)
        assert reachable(graph) == set(range(size)), name


def test_degrees_are_those_of_the_shape():
    for size in SIZES:
        assert {len(n) for n in topology.ring(size)} == {min(2, size - 1)}
        assert {len(n) for n in topology.complete(size)} == {size - 1}
        if size > 1:
            star = [len(n) for n in topology.star(size, hub=size - 1)]
            assert star == [1] * (size - 1) + [size - 1]
    assert {len(n) for n in topology.torus(3, 4)} == {4}
    assert {len(n) for n in topology.torus(2, 4)} == {3}
    assert {len(n) for n in topology.torus(2, 2)} == {2}


def test_neighbours_on_small_graphs():
    assert topology.ring(1) == [[]]
    assert topology.ring(2) == [[1], [0]]
    assert topology.ring(4) == [[1, 3], [0, 2], [1, 3], [0, 2]]
    assert topology.torus(3, 3)[4] == [1, 3, 5, 7]
    assert topology.torus(3, 3)[0] == [1, 2, 3, 6]
    assert topology.star(3) == [[1, 2], [0], [0]]


def test_sizes_and_hubs_that_cannot_be_are_refused():
    for make in (topology.ring, topology.complete, topology.star):
        with pytest.raises(ValueError, match="=0 must be at least 1"):
            make(0)
    with pytest.raises(ValueError, match="columns=0 must be at least 1"):
        topology.torus(2, 0)
    with pytest.raises(ValueError, match="hub=3 is not a rank of 3"):
        topology.star(3, 3)
