"""Mixing with both neighbours through compressed differences, on thread ranks."""

import pytest
import torch
from bagua import _C
from bagua._ops.operations import mixing_weights as weights_of_library
from oracle.codec import payload_bytes
from oracle.low_precision_decentralized import Ring
from support.cases import over
from support.threads.op_ranks import (
    BAD_VALUES,
    MORE_THAN_A_PIECE,
    RANKS,
    SIZES,
    bits,
    inputs,
    per_codec,
    per_dtype,
    per_ranks,
)
from support.threads.thread_ranks import run_thread_ranks

ROUNDS = 4
FRAME_BYTES = 32
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


def run_rounds(comm, codec, start, added, sizes):
    """After each round: the weights and the three replicas."""
    op, replicas = make_op(comm, codec, start, weights_of_library(sizes, comm.rank))
    flat = start.clone()
    rounds = []
    for k, of_ranks in enumerate(added):
        flat += of_ranks[comm.rank]
        op.run(flat, step=k + 1)
        rounds.append([flat.clone(), *(replica.clone() for replica in replicas)])
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


@per_ranks
@per_dtype
def test_every_round_gives_the_bits_of_the_oracle_and_replicas_are_the_neighbours(dtype, n):
    for numel in SIZES:
        expect_oracle(n, "block_uint8", dtype, numel)


@per_codec
@over(n=[2, 3])
def test_every_codec_gives_the_bits_of_the_oracle(codec, n):
    expect_oracle(n, codec, torch.float32, 14337)


@over(numel=[MORE_THAN_A_PIECE, MORE_THAN_A_SEGMENT], n=[2, 3])
def test_pieces_and_segments_change_nothing(n, numel):
    expect_oracle(n, "block_uint8", torch.float32, numel, rounds=2)


@over(sizes=[[3, 1], [2, 1, 4], [1, 1, 2, 5]])
def test_members_of_different_sizes_mix_as_in_the_oracle(sizes):
    expect_oracle(len(sizes), "fp16", torch.float32, 3000, sizes=sizes)


@over(numel=[4096, 14337], n=RANKS)
def test_two_messages_are_sent_and_with_two_ranks_one(n, numel):
    def run(comm):
        counting = _C.CountingCommunicator(comm)
        op, _ = make_op(counting, "block_uint8", torch.ones(numel))
        op.run(torch.zeros(numel))
        return counting.traffic()

    messages = {1: 0, 2: 1}.get(n, 2)
    for traffic in run_thread_ranks(n, run):
        size = FRAME_BYTES + payload_bytes("block_uint8", torch.float32, numel)
        assert traffic["bytes_sent"] == traffic["bytes_received"] == messages * size
        assert traffic["messages_sent"] == messages


@over(n=[2, 3, 4], bad=BAD_VALUES.values())
def test_a_bad_value_passes_on_for_as_long_as_it_is_there_and_replicas_stay_finite(n, bad):
    numel = 3 * 2048
    added = [updates(n, numel, torch.float32, k) for k in range(ROUNDS)]
    added[1][1][2048] = bad

    def run(comm):
        rounds = []
        op, replicas = make_op(comm, "block_uint8", start_of(numel, torch.float32))
        flat = start_of(numel, torch.float32)
        for k, of_ranks in enumerate(added):
            flat = flat + of_ranks[comm.rank]
            op.run(flat, step=k + 1)
            rounds.append([flat.clone(), *(replica.clone() for replica in replicas)])
            if k == 1:  # as a user who loads the last good weights
                flat = torch.where(flat.isfinite(), flat, replicas[0])
        return rounds

    results = run_thread_ranks(n, run)
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


def make_with(replicas, mixing=THIRD):
    return _C.CompressedGossip(alone(), _C.make_codec("fp16"), _C.Scratch(), *replicas, *mixing)


def zeros(*numels, dtype=torch.float32):
    return [torch.zeros(numel, dtype=dtype) for numel in numels]


def test_invalid_arguments_are_refused_and_named():
    one = torch.zeros(3)
    for replicas in (zeros(3, 3, 4), zeros(3, 3, 3, dtype=torch.float16), [torch.zeros(2, 2)] * 3):
        with pytest.raises(
            ValueError, match=r"replicas must be contiguous float32 .* equal length"
        ):
            make_with(replicas)
    with pytest.raises(ValueError, match="replicas must be memory of their own"):
        make_with([one, one, torch.zeros(3)])
    for mixing in ((0.0, 0.3), (0.5, 0.5)):
        with pytest.raises(ValueError, match=r"mixing weights .* must be above 0 and leave"):
            make_with(zeros(3, 3, 3), mixing)
    with pytest.raises(ValueError, match=r"'eager': replicas \(3 elements\) .* bucket \(4 elem"):
        make_with(zeros(3, 3, 3)).run(torch.zeros(4))
    with pytest.raises(ValueError, match="'eager': replicas"):
        make_with([one, *zeros(3, 3)]).run(one)
    with pytest.raises(ValueError, match="'eager' holds Long; only floating weights"):
        make_with(zeros(3, 3, 3)).run(torch.zeros(3, dtype=torch.int64))


def test_another_ranks_other_plan_names_the_bucket_and_the_peer():
    caught = []

    def run(comm):
        codec = "minmax_uint8" if comm.rank == 1 else "block_uint8"
        op, _ = make_op(comm, codec, torch.ones(2048))  # of this size payloads are equally long
        try:
            op.run(torch.zeros(2048), bucket="the bucket")
        except _C.BaguaMismatchError as error:
            caught.append(str(error))

    run_thread_ranks(2, run)
    for peer, message in zip((0, 1), sorted(caught), strict=True):
        assert message.startswith(f"bucket 'the bucket': the payload from rank {peer} does not")


def test_the_op_describes_itself():
    op, _ = make_op(alone(), "block_uint8", torch.zeros(3))
    assert op.describe() == "CompressedGossip(block_uint8, ring of 1)"
