"""Sparse means on thread ranks: the oracle's bits, residuals, bad values."""

import math

import torch
from bagua import _C
from oracle import sparse as oracle
from support.cases import over
from support.threads.op_ranks import BAD_VALUES, RANKS, assert_same_bits, per_dtype
from support.threads.sparse_ranks import (
    SIZES,
    bring,
    expected_rounds,
    k_of,
    make,
    memory_of,
    sparse_rounds,
)
from support.threads.thread_ranks import run_thread_ranks


@over(n=[*RANKS, 64], numel=SIZES)
@per_dtype
def test_every_round_has_the_bits_of_the_oracle(n, numel, dtype):
    rounds, k = bring(n, numel, dtype), k_of(numel)
    results = sparse_rounds(n, k, rounds)
    for step, (result, errors) in enumerate(expected_rounds(k, rounds)):
        assert_same_bits([seen[step][0] for seen in results])
        assert torch.equal(results[0][step][0], result), f"round {step}"
        for rank in range(n):
            assert torch.equal(results[rank][step][1], errors[rank]), f"round {step}, rank {rank}"


@over(scale=[2.0**10, 2.0**-4, 3.0])
def test_memory_is_in_unscaled_units(scale):
    plain = bring(3, 1000, torch.float32)
    scaled = [[g * scale for g in brought] for brought in plain]
    results = sparse_rounds(3, 20, scaled, scale=scale)
    for step, (result, errors) in enumerate(expected_rounds(20, scaled, scale)):
        assert torch.equal(results[0][step][0], result)
        assert torch.equal(results[1][step][1], errors[1])
    if math.log2(scale).is_integer():
        unscaled = sparse_rounds(3, 20, plain)
        for ours, theirs in zip(results, unscaled, strict=True):
            assert torch.equal(ours[-1][0], theirs[-1][0] * scale)
            assert torch.equal(ours[-1][1], theirs[-1][1])


def test_without_error_feedback_there_is_no_residual():
    rounds = bring(3, 1000, torch.float32)
    results = sparse_rounds(3, 20, rounds, remembers=False)
    for step, (result, _) in enumerate(expected_rounds(20, rounds, remembers=False)):
        assert torch.equal(results[2][step][0], result)
    assert results[0][-1][1].numel() == 0


@per_dtype
@over(bad=BAD_VALUES.values())
def test_a_bad_value_reaches_all_ranks_and_no_memory(dtype, bad):
    rounds = bring(3, 1000, dtype)
    rounds[2][1][777] = bad
    results = sparse_rounds(3, 20, rounds)
    for rank in range(3):
        assert not results[rank][2][0].isfinite().all()
        assert torch.equal(results[rank][2][1], results[rank][1][1]), "memory is as it was"
        assert results[rank][3][0].isfinite().all()
    assert_same_bits([seen[2][0].isfinite() for seen in results])
    for step, (result, errors) in enumerate(expected_rounds(20, rounds)):
        torch.testing.assert_close(results[0][step][0], result, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(results[0][step][1], errors[0])


def test_more_bad_values_than_are_sent_are_seen():
    rounds = [[torch.full((100,), math.inf), torch.zeros(100)]]
    for [(flat, error)] in sparse_rounds(2, 3, rounds):
        assert not flat.isfinite().all()
        assert not error.any()


def test_a_result_that_overflows_the_buckets_dtype_leaves_memory():
    big = torch.full((100,), 60000.0, dtype=torch.float16)
    rounds = [[big.clone(), big.clone()], [big.clone(), big.clone()]]
    results = sparse_rounds(2, 60, rounds[:1])
    assert results[0][0][0].isfinite().all()
    results = sparse_rounds(2, 60, rounds)  # the second time 40 elements owe 120000
    for seen in results:
        assert seen[1][0].isinf().any()
        assert torch.equal(seen[1][1], seen[0][1])


def test_one_bad_bucket_leaves_the_memory_of_the_others():
    def run(comm):
        outcome = _C.RoundOutcome()
        kinds = ["top-k", "top-k", "exact"]
        memories = [memory_of(50, torch.float32, outcome) for _ in kinds]
        ops = [make(comm, kind, 50, 5, m) for kind, m in zip(kinds, memories, strict=True)]
        seen = []
        for step in range(1, 4):
            for op, kind in zip(ops, kinds, strict=True):
                flat = torch.full((50,), step + comm.rank + 0.5)
                if step == 2 and comm.rank == 1 and kind == "exact":
                    flat[3] = math.nan
                op.run(flat, step=step)
            seen.append(
                [m.value(0).clone() for m in memories] + [int(m.value(1)) for m in memories]
            )
        return seen

    for first, second, third in run_thread_ranks(2, run):
        assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))
        assert (first[3:], second[3:], third[3:]) == ([1] * 3, [1] * 3, [2] * 3)
        assert not torch.equal(second[0], third[0])
        assert first[0].any()


@over(scale=[1.0, 2.0**8])
@per_dtype
def test_an_exact_bucket_adds_the_residual_once(dtype, scale):
    def run(comm):
        memory = memory_of(8, dtype)
        memory.set(0, torch.full((8,), 2.0 * comm.rank, dtype=oracle.wide(dtype)))
        op = make(comm, "exact", 8, 8, memory)
        flats = [torch.full((8,), scale, dtype=dtype) for _ in range(2)]
        for step, flat in enumerate(flats):
            op.run(flat, step=step + 1, grad_scale=scale)
        return flats, memory.value(0)

    for (first, second), owed in run_thread_ranks(3, run):
        assert torch.equal(first, torch.full_like(first, 3.0 * scale)), "1 and the mean of 0, 2, 4"
        assert torch.equal(second, torch.full_like(second, scale))
        assert not owed.any()


def test_an_index_beyond_the_integers_of_f32_survives():
    def run(comm):
        flat = torch.zeros(2**24 + 3)
        flat[2**24 + comm.rank] = 1.0
        make(comm, "top-k", flat.numel(), 1, memory_of(flat.numel(), flat.dtype)).run(flat)
        return flat.nonzero().flatten().tolist()

    assert run_thread_ranks(2, run) == [[2**24, 2**24 + 1]] * 2
