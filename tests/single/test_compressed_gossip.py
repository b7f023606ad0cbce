"""Mixing with both neighbours through compressed differences, on thread ranks."""

import torch
from bagua import _C
from bagua._ops.operations import mixing_weights as weights_of_library
from oracle.low_precision_decentralized import Ring
from support.cases import over
from support.threads.op_ranks import (
    BAD_VALUES,
    CODECS,
    DTYPES,
    MORE_THAN_A_PIECE,
    RANKS,
    SIZES,
    bits,
    inputs,
)
from support.threads.thread_ranks import run_thread_ranks

ROUNDS = 4
MORE_THAN_A_SEGMENT = 8 * 131072 + 2048 + 5
THIRD = (1 / 3, 1 / 3)


def start_of(numel, dtype):
    return inputs(1, numel, dtype, salt=99)[0]


def make_op(comm, codec, start, mixing=THIRD):
    """The op and its replicas, which all start as the weights that all ranks have."""
    replicas = [start.float().clone() for _ in range(3)]
    return _C.CompressedGossip(comm, _C.make_codec(codec), _C.Scratch(), *replicas, *mixing), (
        replicas
    )


def updates(n, numel, dtype, round):
    """Updates of the ranks' optimizers: smaller than the weights."""
    return [0.1 * update for update in inputs(n, numel, dtype, salt=round)]


def run_rounds(comm, codec, start, added, sizes, repaired_after=None):
    """After each round: the weights and the three replicas.

    repaired_after: the round behind which non-finite weights are taken from the replica.
    """
    op, replicas = make_op(comm, codec, start, weights_of_library(sizes, comm.rank))
    flat = start.clone()
    rounds = []
    for k, of_ranks in enumerate(added):
        flat += of_ranks[comm.rank]
        op.run(flat, step=k + 1)
        rounds.append([flat.clone(), *(replica.clone() for replica in replicas)])
        if k == repaired_after:
            flat = torch.where(flat.isfinite(), flat, replicas[0])
    return rounds


def same(a, b):
    return torch.equal(bits(a), bits(b))


def expect_oracle(n, codec, dtype, numel, rounds=ROUNDS, sizes=None):
    sizes = [1] * n if sizes is None else sizes
    start = start_of(numel, dtype)
    added = [updates(n, numel, dtype, k) for k in range(rounds)]
    results = run_thread_ranks(n, run_rounds, codec, start, added, sizes)
    ring = Ring(start, codec, sizes)
    flats = [start.clone() for _ in range(n)]
    for k in range(rounds):
        flats = ring.mix([flat + update for flat, update in zip(flats, added[k], strict=True)])
        for rank in range(n):
            flat, own, left, right = results[rank][k]
            where = f"round {k}, rank {rank} of {n}, {numel} elements"
            assert same(flat, flats[rank]), f"weights, {where}"
            if n > 1:
                assert same(own, ring.weights[rank]), f"own replica, {where}"
                assert same(left, results[rank - 1][k][1]), f"left replica, {where}"
                assert same(right, results[(rank + 1) % n][k][1]), f"right replica, {where}"


#: (codec, ranks, dtype, elements, rounds)
CASES = [
    ("block_uint8", n, dtype, size, ROUNDS)
    for n in RANKS
    for dtype in DTYPES.values()
    for size in SIZES
]
CASES += [(codec, n, torch.float32, 14337, ROUNDS) for codec in CODECS for n in (2, 3)]
CASES += [
    ("block_uint8", n, torch.float32, size, 2)
    for n in (2, 3)
    for size in (MORE_THAN_A_PIECE, MORE_THAN_A_SEGMENT)
]


@over(case=CASES)
def test_every_round_gives_the_bits_of_the_oracle_and_replicas_are_the_neighbours(case):
    codec, n, dtype, numel, rounds = case
    expect_oracle(n, codec, dtype, numel, rounds)


@over(sizes=[[3, 1], [2, 1, 4], [1, 1, 2, 5]])
def test_members_of_different_sizes_mix_as_in_the_oracle(sizes):
    expect_oracle(len(sizes), "fp16", torch.float32, 3000, sizes=sizes)


@over(n=[2, 3, 4], bad=BAD_VALUES.values())
def test_a_bad_value_passes_on_for_as_long_as_it_is_there_and_replicas_stay_finite(n, bad):
    numel = 3 * 2048
    added = [updates(n, numel, torch.float32, k) for k in range(ROUNDS)]
    added[1][1][2048] = bad

    start = start_of(numel, torch.float32)
    # As a user who loads the last good weights after the bad round.
    results = run_thread_ranks(n, run_rounds, "block_uint8", start, added, [1] * n, 1)
    for rank, rounds in enumerate(results):
        reached = rank in (0, 1, 2)
        touched = torch.zeros(numel, dtype=torch.bool)
        touched[2048:4096] = reached
        assert torch.equal(rounds[1][0].isnan(), touched), "its block, on it and both neighbours"
        for k in range(ROUNDS):
            flat, own, left, right = rounds[k]
            assert all(replica.isfinite().all() for replica in (own, left, right))
            assert same(left, results[rank - 1][k][1])
            assert same(right, results[(rank + 1) % n][k][1])
            if k != 1:
                assert same(flat, own)
        before, after = rounds[0][1][2048:4096], rounds[1][1][2048:4096]
        assert same(before, after) == (rank == 1), "its replicas are as they were before"


def test_one_rank_keeps_its_weights():
    op, replicas = make_op(alone(), "block_uint8", torch.zeros(5))
    flat = torch.arange(5.0)
    op.run(flat)
    assert flat.tolist() == [0, 1, 2, 3, 4]
    assert all(not replica.any() for replica in replicas)


def alone():
    return _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)
