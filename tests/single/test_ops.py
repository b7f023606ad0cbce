"""Ops on thread ranks: against their oracles, bit for bit between ranks, and with bad values."""

from types import SimpleNamespace

import torch
from bagua import _C
from bagua._ops.operations import Lane
from oracle.compressed_all_reduce import compressed_all_reduce
from support.cases import over
from support.threads.op_ranks import (
    BAD_NUMEL,
    BAD_PLACES,
    BAD_VALUES,
    CODECS,
    COMPLEX,
    DTYPES,
    MORE_THAN_A_PIECE,
    OPS,
    RANKS,
    SIZES,
    assert_reduced,
    assert_same_bits,
    bits,
    compressed,
    inputs,
    make_op,
    per_codec,
    per_op,
    per_ranks,
    per_ranks_and_dtype,
    run_op,
)


@per_codec
@per_ranks_and_dtype(RANKS)
def test_compressed_all_reduce_gives_the_bits_of_its_oracle(n, codec, dtype):
    # The mean is a division of what was decoded, before it is encoded: one codec has both.
    ops = OPS if codec == "block_uint8" else ["mean"]
    for numel in SIZES:
        for op in ops:
            brought = inputs(n, numel, dtype)
            results = run_op(n, lambda comm, op=op: compressed(comm, codec, op), brought)
            assert_same_bits(results)
            expected = compressed_all_reduce(codec, brought, average=op == "mean")
            assert torch.equal(results[0], expected), f"{op} of {numel}"


@over(
    codec=CODECS,
    case=[(3, 3 * MORE_THAN_A_PIECE), (3, 3 * MORE_THAN_A_PIECE - 7), (64, 14337)],
)
def test_parts_of_several_pieces_and_of_many_ranks_give_the_bits_of_the_oracle(codec, case):
    brought = inputs(*case, torch.float32)
    results = run_op(case[0], lambda comm: compressed(comm, codec, "mean"), brought)
    assert_same_bits(results)
    assert torch.equal(results[0], compressed_all_reduce(codec, brought, average=True))


def test_compressed_all_reduce_gives_the_golden_vector_of_bagua():
    brought = [
        torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8]),
        torch.tensor([1.0, 0.9, 0.8, 0.7, -0.6, -0.5, -0.4, -0.3]),
    ]
    first = [0.549019933, 0.349804133, 0.549019933, 0.149019688]
    second = [-0.0494117774, -0.549019754, 0.150980428, -0.549019754]
    for result in run_op(2, lambda comm: compressed(comm, "minmax_uint8", "mean"), brought):
        assert torch.equal(result, torch.tensor(first + second))


@per_op
@per_ranks
@over(dtype=[*DTYPES.values(), *COMPLEX])
def test_all_reduce_gives_the_sum_or_mean(n, op, dtype):
    for numel in [*SIZES, MORE_THAN_A_PIECE]:
        brought = inputs(n, numel, dtype)
        results = run_op(n, lambda comm: _C.AllReduce(comm, OPS[op]), brought)
        assert_same_bits(results)
        assert_reduced(results[0], brought, op)
        if dtype.is_complex:
            reals = [torch.view_as_real(flat).view(-1) for flat in brought]
            parts = run_op(n, lambda comm: _C.AllReduce(comm, OPS[op]), reals)
            assert torch.equal(torch.view_as_real(results[0]).view(-1), parts[0])


@over(kind=["exact", *CODECS])
def test_one_rank_alone_keeps_its_bits(kind):
    brought = inputs(1, 4099, torch.float32)
    (result,) = run_op(1, lambda comm: make_op(comm, kind), brought)
    assert torch.equal(bits(result), bits(brought[0]))


def assert_a_bad_value_reaches_every_rank(kind, op, dtype):
    for bad in BAD_VALUES.values():
        for number, (place, index) in enumerate(BAD_PLACES.items()):
            brought = inputs(3, BAD_NUMEL, dtype)
            brought[number % 3][index] = complex(0.0, bad) if dtype.is_complex else bad
            results = run_op(3, lambda comm: make_op(comm, kind, op), brought)
            assert_same_bits(results)
            assert not results[0][index].isfinite(), f"{bad}, {place}"


@per_op
@over(kind=["exact", *CODECS])
def test_a_bad_value_reaches_every_rank(kind, op):
    assert_a_bad_value_reaches_every_rank(kind, op, torch.float32)


@over(kind=["exact", *CODECS], dtype=[torch.float16, torch.bfloat16, torch.float64])
def test_a_bad_value_reaches_every_rank_in_other_dtypes(kind, dtype):
    assert_a_bad_value_reaches_every_rank(kind, "mean", dtype)


@over(dtype=COMPLEX)
def test_a_bad_part_of_a_complex_number_reaches_every_rank(dtype):
    assert_a_bad_value_reaches_every_rank("exact", "mean", dtype)


class Connected:
    ranks = (0, 1)

    def connect(self, *_, **__):
        return object()


def test_two_groups_of_equal_numbers_have_two_communicators_in_a_lane():
    """Islands have numbers, as ranks have."""
    groups = [SimpleNamespace(connections=Connected()) for _ in range(2)]
    lane = Lane("lane", torch.device("cpu"), groups[0])
    first, second = (lane.communicator(group) for group in groups)
    assert first is not second
    assert lane.communicator(None) is first
    assert lane.by_purpose == [("all", first), ("all", second)]
