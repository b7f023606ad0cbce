"""Peers of pairwise averaging and members of nodes, for every size up to 64."""

import pytest
from bagua import _C
from bagua._core.group.connections import by_node

SIZES = range(1, 65)


def peers(size, step):
    return [_C.shift_one_peer(rank, size, step) for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "step", "expected"),
    [(4, 0, [2, 3, 0, 1]), (4, 1, [3, 2, 1, 0]), (6, 1, [4, 5, 3, 2, 0, 1]), (2, 9, [1, 0])],
)
def test_even_pairs_are_those_of_bagua(size, step, expected):
    assert peers(size, step) == expected


def test_pairs_are_mutual_and_only_odd_groups_leave_one_rank_out():
    for size in SIZES:
        for step in range(size + 3):
            pairs = peers(size, step)
            assert all(pairs[peer] == rank for rank, peer in enumerate(pairs))
            alone = [rank for rank, peer in enumerate(pairs) if rank == peer]
            assert len(alone) == size % 2


def test_pairs_repeat_once_each_rank_has_met_the_other_half_or_all_of_an_odd_group():
    for size in SIZES:
        half = size // 2
        period = half if size % 2 == 0 else size
        for rank in range(size):
            met = [_C.shift_one_peer(rank, size, step) for step in range(period)]
            other_half = range(half, size) if rank < half else range(half)
            assert sorted(met) == list(range(size) if size % 2 else other_half)
            assert _C.shift_one_peer(rank, size, period) == met[0]


def test_steps_far_beyond_32_bits_are_exact():
    for size in (3, 4, 6, 7):
        period = size // 2 if size % 2 == 0 else size
        assert peers(size, 10**18 // period * period + 1) == peers(size, 1)


def test_the_lowest_rank_of_a_node_leads_it():
    assert by_node([5, -1, 5, 5, -1, 0]) == [[0, 2, 3], [1, 4], [5]]
    assert by_node([]) == []


def test_node_members_partition_every_layout():
    for size in SIZES:
        for per_node in (1, 2, 3, 8, 64):
            nodes = [rank // per_node for rank in range(size)]
            members = by_node(nodes)
            assert sorted(rank for group in members for rank in group) == list(range(size))
            assert [group[0] for group in members] == list(range(0, size, per_node))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _C.shift_one_peer(3, 3, 0), "rank 3 is outside a group of size 3"),
        (lambda: _C.shift_one_peer(-1, 3, 0), "rank -1 is outside"),
        (lambda: _C.shift_one_peer(0, 0, 0), "rank 0 is outside a group of size 0"),
        (lambda: _C.shift_one_peer(0, 2, -1), "step is not negative"),
    ],
    ids=["rank too high", "rank negative", "no ranks", "step negative"],
)
def test_arguments_outside_the_group_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
