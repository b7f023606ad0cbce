"""AllReduceRows: the exact mean of sparse gradients, on thread ranks."""

import pytest
import torch
from bagua import _C
from oracle import all_reduce_rows as oracle
from support.cases import over
from support.threads.op_ranks import BAD_VALUES, DTYPES, OPS, assert_same_bits, per_op, per_ranks
from support.threads.thread_ranks import run_thread_ranks

ROWS, WIDTH = 23, 5
TYPES = DTYPES | {"c64": torch.complex64, "c128": torch.complex128}
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float64: 1e-14}

per_type = over(dtype=TYPES.values())


def gradient(rows, dtype=torch.float32, shape=(ROWS, WIDTH), seed=0):
    """The gradient of `nn.Embedding(sparse=True)` for the indices `rows`: not coalesced."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.randn(len(rows), *shape[1:], generator=generator, dtype=wide).to(dtype)
    indices = torch.tensor([rows], dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def uneven(n, dtype=torch.float32, shape=(ROWS, WIDTH)):
    """A gradient per rank: different numbers of rows, rows in common, one rank without any."""
    brought = []
    for rank in range(n):
        generator = torch.Generator().manual_seed(7 * n + rank)
        count = (5 * rank + 3) % 17 if rank != 1 else 0
        rows = torch.randint(shape[0], (count,), generator=generator).tolist()
        brought.append(gradient(rows, dtype, shape, seed=rank))
    return brought


def reduced(brought, op="mean", dtype=torch.float32, shape=(ROWS, WIDTH)):
    """(result, the bucket's one element) per rank."""

    def run(comm):
        holder = _C.SparseGradient()
        holder.local = brought[comm.rank]
        flat = torch.zeros(1, dtype=dtype)
        _C.AllReduceRows(comm, _C.Scratch(), holder, list(shape), OPS[op]).run(flat)
        assert holder.local is None
        return holder.result, flat

    return run_thread_ranks(len(brought), run)


def expect_oracle(brought, op="mean", dtype=torch.float32, shape=(ROWS, WIDTH)):
    before = [g if g is None else g.clone() for g in brought]
    results = [result for result, _ in reduced(brought, op, dtype, shape)]
    for given, old in zip(brought, before, strict=True):
        if old is not None:
            assert torch.equal(given._indices(), old._indices())
            assert torch.equal(given._values(), old._values())
    expected = (oracle.mean if op == "mean" else oracle.total)(brought, shape)
    for result in results:
        assert result.is_coalesced()
        assert (result.sparse_dim(), result.dtype, result.shape) == (1, dtype, shape)
        assert result.indices()[0].tolist() == oracle.touched(brought)
        tolerance = TOLERANCE.get(dtype, 1e-6)
        torch.testing.assert_close(
            result.to_dense().to(expected.dtype), expected, rtol=tolerance, atol=tolerance
        )
    assert_same_bits([result.indices() for result in results])
    assert_same_bits([result.values() for result in results])
    return results


@per_ranks
@per_op
@per_type
def test_every_rank_holds_the_oracles_result_in_the_same_bits(n, op, dtype):
    expect_oracle(uneven(n, dtype), op, dtype)


@per_ranks
@over(shape=[(1, 1), (3, 31), (1000, 1), (6, 2, 3), (9,), (4, 0)])
def test_shapes_that_do_not_divide(n, shape):
    expect_oracle(uneven(n, shape=shape), shape=shape)


@per_ranks
def test_ranks_without_rows_and_with_all_of_them(n):
    nothing, some = [None] * n, gradient([4, 2, 4, 22, 0])
    expect_oracle([*uneven(n)[:-1], None])
    expect_oracle([some, *nothing[1:]])
    expect_oracle([*nothing[1:], some])
    expect_oracle([gradient(list(range(ROWS)) * 2, seed=rank) for rank in range(n)])
    for brought in (nothing, [gradient([])] * n):
        for result in expect_oracle(brought):
            assert result._nnz() == 0


@per_ranks
@over(bad=BAD_VALUES.values())
def test_a_value_that_is_not_finite_reaches_every_rank_and_the_bucket(n, bad):
    brought = uneven(n)
    brought[n - 1] = gradient([3, 8])
    brought[n - 1]._values()[1, 2] = bad
    for result, flat in reduced(brought):
        row = result.to_dense()[8]
        assert not row[2].isfinite()
        assert row[[0, 1, 3, 4]].isfinite().all()
        assert not flat.isfinite().all()
    for _, flat in reduced(uneven(n)):
        assert flat.isfinite().all()


def test_half_precision_is_divided_before_it_is_summed():
    """As torch does: 60000 + 60000 is more than float16 holds, their mean is not."""
    brought = [gradient([1], torch.float16) for _ in range(2)]
    for given in brought:
        given._values().fill_(60000.0)
    for result, _ in reduced(brought, dtype=torch.float16):
        assert result.values().tolist() == [[60000.0] * WIDTH]


def message(rows, width=WIDTH):
    """The indices `rows` and values of ones, as they lie on the wire."""
    indices = torch.tensor(rows, dtype=torch.int64).view(torch.uint8)
    values = torch.ones(len(rows), width).view(torch.uint8).reshape(-1)
    padded = -(-indices.numel() // 16) * 16, -(-values.numel() // 16) * 16
    result = torch.zeros(sum(padded), dtype=torch.uint8)
    result[: indices.numel()] = indices
    result[padded[0] : padded[0] + values.numel()] = values
    return result


CORRUPTED = "payload from rank 1 was corrupted"


@over(
    case=[
        (-1, None, "rank 1 announces -1 rows"),
        (ROWS + 1, None, f"rank 1 announces {ROWS + 1} rows"),
        *((2, rows, CORRUPTED) for rows in ([3, 3], [5, 3], [-1, 3], [3, ROWS])),
    ]
)
def test_messages_of_other_ranks_are_checked(case):
    count, rows, words = case

    def run(comm):
        if comm.rank == 1:
            comm.all_gather(torch.tensor([count]), torch.zeros(2, dtype=torch.int64))
            if rows is not None:
                sent = message(rows)
                comm.all_gather(sent, torch.zeros(2 * sent.numel(), dtype=torch.uint8))
            return
        holder = _C.SparseGradient()
        holder.local = gradient([1, 2])
        op = _C.AllReduceRows(comm, _C.Scratch(), holder, [ROWS, WIDTH], OPS["mean"])
        with pytest.raises(_C.BaguaMismatchError, match=words):
            op.run(torch.zeros(1))

    run_thread_ranks(2, run)
