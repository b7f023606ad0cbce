"""Ops on thread ranks: against their oracles, bit for bit between ranks, and with bad values."""

import pytest
import torch
from bagua import _C
from oracle.compressed_all_reduce import compressed_all_reduce
from support.cases import over
from support.threads.op_ranks import (
    BAD_NUMEL,
    BAD_PLACES,
    BAD_VALUES,
    CODECS,
    MORE_THAN_A_PIECE,
    OPS,
    RANKS,
    SIZES,
    assert_same_bits,
    bits,
    compressed,
    inputs,
    make_op,
    per_codec,
    per_dtype,
    per_op,
    per_ranks,
    per_ranks_and_dtype,
    run_op,
)
from support.threads.thread_ranks import run_thread_ranks


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


@per_codec
def test_parts_of_several_pieces_give_the_bits_of_the_oracle(codec):
    n = 3
    numel = n * MORE_THAN_A_PIECE
    # 7: the parts are of different sizes, whatever the codec is.
    for missing in (0, 7) if codec == "block_uint8" else (0,):
        brought = inputs(n, numel - missing, torch.float32)
        results = run_op(n, lambda comm: compressed(comm, codec, "mean"), brought)
        assert_same_bits(results)
        assert torch.equal(results[0], compressed_all_reduce(codec, brought, average=True))


def test_compressed_all_reduce_gives_the_golden_vector_of_bagua():
    brought = [
        torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8]),
        torch.tensor([1.0, 0.9, 0.8, 0.7, -0.6, -0.5, -0.4, -0.3]),
    ]
    expected = torch.tensor(
        [
            0.549019933,
            0.349804133,
            0.549019933,
            0.149019688,
            -0.0494117774,
            -0.549019754,
            0.150980428,
            -0.549019754,
        ]
    )
    for result in run_op(2, lambda comm: compressed(comm, "minmax_uint8", "mean"), brought):
        assert torch.equal(result, expected)


@per_codec
def test_zeros_stay_zero(codec):
    brought = [torch.zeros(5000) for _ in range(3)]
    for result in run_op(3, lambda comm: compressed(comm, codec, "sum"), brought):
        assert torch.equal(bits(result), bits(brought[0]))


@per_dtype
@per_op
@per_ranks
def test_all_reduce_gives_the_sum_or_mean(n, op, dtype):
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-12}.get(dtype, 1e-5)
    for numel in [*SIZES, MORE_THAN_A_PIECE]:
        brought = inputs(n, numel, dtype)
        results = run_op(n, lambda comm: _C.AllReduce(comm, OPS[op]), brought)
        assert_same_bits(results)
        exact = torch.stack(brought).double().sum(0) / (n if op == "mean" else 1)
        scale = torch.stack(brought).double().abs().sum(0) / (n if op == "mean" else 1)
        assert ((results[0].double() - exact).abs() <= tolerance * scale).all()


@over(kind=["exact", *CODECS])
def test_one_rank_alone_keeps_its_bits(kind):
    brought = inputs(1, 4099, torch.float32)
    (result,) = run_op(1, lambda comm: make_op(comm, kind), brought)
    assert torch.equal(bits(result), bits(brought[0]))


@per_op
@over(kind=["exact", *CODECS], bad=BAD_VALUES.values())
def test_a_bad_value_reaches_every_rank(kind, bad, op):
    for place, index in BAD_PLACES.items():
        for culprit in range(3):
            brought = inputs(3, BAD_NUMEL, torch.float32)
            brought[culprit][index] = bad
            results = run_op(3, lambda comm: make_op(comm, kind, op), brought)
            assert_same_bits(results)
            assert not results[0][index].isfinite(), f"{place}, rank {culprit}"


@per_codec
@over(dtype=[torch.float16, torch.bfloat16, torch.float64])
def test_a_bad_value_reaches_every_rank_in_other_dtypes(codec, dtype):
    for bad in BAD_VALUES.values():
        for place, index in BAD_PLACES.items():
            brought = inputs(3, BAD_NUMEL, dtype)
            brought[1][index] = bad
            results = run_op(3, lambda comm: compressed(comm, codec, "mean"), brought)
            assert_same_bits(results)
            assert not results[0][index].isfinite(), place


def test_integers_and_wrong_reductions_are_refused():
    comm = _C.ThreadCommunicator(_C.ThreadHub(2, 1.0), 0)
    with pytest.raises(_C.BaguaError, match=r"takes float32.*not Int.*to_ignore"):
        compressed(comm, "block_uint8", "mean").run(torch.zeros(4, dtype=torch.int32))
    for make in (
        lambda: _C.AllReduce(comm, _C.ReduceOp.MAX),
        lambda: _C.CompressedAllReduce(comm, _C.make_codec("fp16"), _C.Scratch(), _C.ReduceOp.MIN),
    ):
        with pytest.raises(ValueError, match=r"takes ReduceOp.SUM or ReduceOp.AVG"):
            make()
    with pytest.raises(ValueError, match=r"leader of a node needs the inner op"):
        _C.Hierarchical(comm, None, 4, 2, _C.ReduceOp.AVG)


@over(kind=["exact", *CODECS])
def test_an_op_describes_itself(kind):
    (text,) = run_thread_ranks(1, lambda comm: make_op(comm, kind, "sum").describe())
    assert text == (
        "AllReduce(sum, ranks 1)"
        if kind == "exact"
        else f"CompressedAllReduce({kind}, sum, ranks 1)"
    )
