"""CompressedReduceScatter and CompressedAllGather on thread ranks, against their oracles."""

import torch
from bagua import _C
from oracle.sharded import all_gather, reduce_scatter
from support.cases import over
from support.threads.op_ranks import (
    BAD_VALUES,
    CODECS,
    DTYPES,
    MORE_THAN_A_PIECE,
    assert_same_bits,
    inputs,
    per_codec,
    per_ranks_and_dtype,
    run_rounds,
)
from support.threads.thread_ranks import run_thread_ranks

PARTS = [1, 31, 1000, 4099]  # elements
RANKS = [1, 2, 3, 4]
MORE_THAN_A_SEGMENT = 9 * 131072 + 5  # of one part


def scattering(comm, codec, divisor=1.0, **options):
    return _C.CompressedReduceScatter(
        comm, _C.make_codec(codec), _C.Scratch(), divisor=divisor, **options
    )


def gathering(comm, codec, **options):
    return _C.CompressedAllGather(comm, _C.make_codec(codec), _C.Scratch(), **options)


def own_part(rank, ranks, flat):
    return flat.chunk(ranks)[rank] if flat.numel() else flat


def memory(numel, outcome):
    return _C.RoundMemory([torch.zeros(numel), torch.zeros(1, dtype=torch.int64)], outcome)


def reduce_rounds(codec, brought, divisor=1.0, scale=1.0, remembers=False):
    """By rank, after each round: its part of the result, and its residual if it remembers."""
    n, numel = len(brought[0]), brought[0][0].numel()

    def make(comm):
        kept = memory(numel, _C.RoundOutcome()) if remembers else None
        op = scattering(comm, codec, divisor, memory=kept)
        return op, kept, (0,) if remembers else ()

    results = run_rounds(n, make, brought, scale)
    return [
        [(own_part(rank, n, flat), *kept) for flat, *kept in seen]
        for rank, seen in enumerate(results)
    ]


def gather_on_ranks(n, codec, shares):
    """Every rank's bucket."""

    def run(comm):
        flat = torch.full((n * shares[0].numel(),), 7.0, dtype=shares[0].dtype)
        own_part(comm.rank, n, flat).copy_(shares[comm.rank])
        gathering(comm, codec).run(flat)
        return flat

    return run_thread_ranks(n, run)


def assert_bits_of_the_oracle(codec, brought, divisor, scale=1.0, remembers=False):
    found = reduce_rounds(codec, brought, divisor, scale, remembers)
    errors = [torch.zeros(brought[0][0].numel())] * len(found) if remembers else None
    for step, values in enumerate(brought):
        expected, errors = reduce_scatter(codec, values, divisor, errors, scale)
        for rank, seen in enumerate(found):
            assert torch.equal(seen[step][0], expected[rank]), f"round {step}, rank {rank}"
            assert not remembers or torch.equal(seen[step][1], errors[rank]), f"rank {rank}"


@per_codec
@per_ranks_and_dtype(RANKS)
def test_reduce_scatter_gives_the_bits_of_its_oracle(n, codec, dtype):
    for part, divisor in zip(PARTS, (float(n), 1.0, 0.25, float(n)), strict=True):
        assert_bits_of_the_oracle(codec, [inputs(n, n * part, dtype)], divisor)


@per_codec
@per_ranks_and_dtype(RANKS, {name: DTYPES[name] for name in ("f32", "f16", "bf16")})
def test_error_feedback_gives_the_bits_of_its_oracle(n, codec, dtype):
    rounds = [inputs(n, n * 3001, dtype, salt=salt) for salt in range(3)]
    assert_bits_of_the_oracle(codec, rounds, float(n), scale=4.0, remembers=True)


@per_codec
@per_ranks_and_dtype(RANKS)
def test_all_gather_gives_the_bits_of_its_oracle_on_every_rank(n, codec, dtype):
    for part in PARTS:
        shares = inputs(n, part, dtype)
        results = gather_on_ranks(n, codec, shares)
        assert_same_bits(results)
        assert torch.equal(results[0], all_gather(codec, shares)), part


@over(
    case=[*((codec, MORE_THAN_A_PIECE) for codec in CODECS), ("block_uint8", MORE_THAN_A_SEGMENT)]
)
def test_parts_of_several_pieces_and_segments_give_the_bits_of_the_oracles(case):
    codec, part = case
    assert_bits_of_the_oracle(codec, [inputs(2, 2 * part, torch.float32)], 2.0)
    shares = inputs(2, part, torch.float32)
    results = gather_on_ranks(2, codec, shares)
    assert_same_bits(results)
    assert torch.equal(results[0], all_gather(codec, shares))


@over(make=[scattering, gathering])
def test_an_empty_bucket_is_left_alone(make):
    def run(comm):
        flat = torch.zeros(0)
        make(comm, "block_uint8").run(flat)
        return flat.numel()

    assert run_thread_ranks(3, run) == [0, 0, 0]


@per_codec
@over(bad=BAD_VALUES.values())
def test_a_bad_value_reaches_the_owner_of_its_part_and_no_other(codec, bad):
    part = 5000
    for culprit in range(3):
        for owner in range(3):
            brought = inputs(3, 3 * part, torch.float32)
            brought[culprit][owner * part + 2047] = bad
            results = reduce_rounds(codec, [brought], 3.0)
            for rank, ((result,),) in enumerate(results):
                assert result.isfinite().all() == (rank != owner)
                assert rank != owner or not result[2047].isfinite()


@per_codec
@over(bad=BAD_VALUES.values())
def test_a_bad_weight_reaches_every_rank(codec, bad):
    shares = inputs(3, 5000, torch.float32)
    shares[1][2047] = bad
    results = gather_on_ranks(3, codec, shares)
    assert_same_bits(results)
    assert not results[0][5000 + 2047].isfinite()
    assert results[0][:5000].isfinite().all()


def test_an_overflow_on_one_rank_leaves_the_memory_of_all_ranks_as_it_was():
    n, part = 3, 64
    good = inputs(n, n * part, torch.float32)
    bad = [x.clone() for x in good]
    bad[1][0] = float("inf")  # in rank 0's part
    for seen in reduce_rounds("int4_block", [good, bad, good], remembers=True):
        first, after_bad, last = (residual for _, residual in seen)
        assert first.abs().max() > 0
        assert torch.equal(first, after_bad)
        assert last.isfinite().all()
        assert not torch.equal(last, first)
