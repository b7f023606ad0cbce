"""Eager collectives that reduce: every op in every form, against the same fold in one process."""

import functools
import itertools
import operator

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import ReduceOp, communication
from support import training

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4], ids="n{}".format)
FOLDS = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BXOR: operator.xor,
    ReduceOp.AVG: operator.add,
}
INTEGER_OPS = [op for op in ReduceOp if op is not ReduceOp.AVG]
FLOAT_OPS = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG]
CASES = [
    *((torch.int64, op) for op in INTEGER_OPS),
    *((torch.float32, op) for op in FLOAT_OPS),
]
FUNCTIONS = [
    "allreduce",
    "allreduce_same",
    "allreduce_inplace",
    "allreduce_coalesced_inplace",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
]
COUNT = 3


def numbers(rank, size, dtype):
    """`size` parts of COUNT small numbers: sums and products of four are exact in 8 bits."""
    return ((torch.arange(size * COUNT) * (rank + 1)) % 4 + 1).to(dtype)


def folded(size, dtype, op):
    total = functools.reduce(FOLDS[op], [numbers(rank, size, dtype) for rank in range(size)])
    return total / size if op is ReduceOp.AVG else total


@training.with_group
def reduce_all(function, size, cases):
    return [reduce_with(function, size, *case) for case in cases]


def reduce_with(function, size, dtype, op):
    """Runs one collective, returns what the receiving tensor holds afterwards."""
    rank, root = bagua.get_rank(), size - 1
    mine = numbers(rank, size, dtype)
    sent = mine.clone()
    result = torch.full_like(mine, 7)
    if function == "allreduce":
        bagua.allreduce(mine, result, op)
    elif function == "allreduce_same":
        bagua.allreduce(mine, mine, op)
    elif function == "allreduce_inplace":
        bagua.allreduce_inplace(mine, op)
    elif function == "allreduce_coalesced_inplace":
        communication.allreduce_coalesced_inplace([mine[:1], mine[1:].view(1, -1)], op)
    elif function == "reduce":
        bagua.reduce(mine, result, root, op)
    elif function == "reduce_inplace":
        bagua.reduce_inplace(mine, root, op)
    elif function == "reduce_scatter":
        result = result[:COUNT]
        bagua.reduce_scatter(mine, result, op)
    else:
        assert function == "reduce_scatter_inplace"
        bagua.reduce_scatter_inplace(mine, op)
    if function in ("allreduce", "reduce", "reduce_scatter"):
        assert torch.equal(mine, sent), "what was sent must stay as it is"
        return result
    return mine


def expected(function, rank, size, dtype, op):
    root, mine = size - 1, numbers(rank, size, dtype)
    total = folded(size, dtype, op)
    part = total[rank * COUNT : (rank + 1) * COUNT]
    if function == "reduce_scatter":
        return part
    if function == "reduce_scatter_inplace":
        return torch.cat([part, mine[COUNT:]])
    if function == "reduce" and rank != root:
        return torch.full_like(mine, 7)
    if function == "reduce_inplace" and rank != root:
        return mine
    return total


@SIZES
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_rank_holds_the_fold_of_all(ranks, function, size):
    for rank, tensors in enumerate(ranks(size, reduce_all, function, size, CASES)):
        for held, (dtype, op) in zip(tensors, CASES, strict=True):
            wanted = expected(function, rank, size, dtype, op)
            torch.testing.assert_close(held, wanted, msg=lambda m, op=op: f"{op.name}: {m}")


def spread(count, dtype):
    """Numbers of many magnitudes, of this rank: their sum depends on the order of the ranks."""
    random = torch.Generator().manual_seed(100 * bagua.get_rank() + count)
    values = torch.randn(count, generator=random) * torch.randn(count, generator=random).exp()
    return values.to(dtype)


def reduced_by_torch(mine, op):
    """What `dist.all_reduce` makes of it; it has no mean over gloo."""
    result = mine.clone()
    dist.all_reduce(result, getattr(dist.ReduceOp, {"AVG": "SUM"}.get(op.name, op.name)))
    return result / bagua.get_world_size() if op is ReduceOp.AVG else result


def reduced_here(mine, op):
    """The result of each function, and its name, on the ranks that have it."""
    size, rank = bagua.get_world_size(), bagua.get_rank()
    count = mine.numel() // size
    result, part = torch.empty_like(mine), torch.empty_like(mine[:count])
    bagua.allreduce(mine, result, op)
    yield "allreduce", result, slice(None)
    bagua.reduce(mine, result, 0, op)
    yield "reduce", result, slice(None)  # on the others, that of allreduce
    bagua.reduce_scatter(mine, part, op)
    yield "reduce_scatter", part, slice(rank * count, (rank + 1) * count)
    copies = [mine.clone() for _ in range(4)]
    bagua.allreduce_inplace(copies[0], op)
    yield "allreduce_inplace", copies[0], slice(None)
    communication.allreduce_coalesced_inplace([copies[1][:1], copies[1][1:]], op)
    yield "allreduce_coalesced_inplace", copies[1], slice(None)
    bagua.reduce_inplace(copies[2], size - 1, op)
    if rank == size - 1:
        yield "reduce_inplace", copies[2], slice(None)
    bagua.reduce_scatter_inplace(copies[3], op)
    yield "reduce_scatter_inplace", copies[3][:count], slice(rank * count, (rank + 1) * count)


@training.with_group
def differences_from_torch(counts, dtypes):
    different = []
    for dtype, count in itertools.product(dtypes, counts):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            if dtype.is_complex and op is ReduceOp.MAX:
                continue
            mine = spread(count, dtype)
            wanted = reduced_by_torch(mine, op)
            for name, held, where in reduced_here(mine, op):
                if not torch.equal(held, wanted[where]):
                    different.append((name, dtype, count, op.name))
    return different


def test_floats_have_the_bits_of_torchs_all_reduce(ranks):
    long, counts = [720_000], [0, 12, 1200, 120_000]
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.complex64]
    for size in (2, 3, 4):
        assert ranks(size, differences_from_torch, long + counts, [torch.float32]) == [[]] * size
        assert ranks(size, differences_from_torch, counts, dtypes) == [[]] * size


@training.with_group
def reduce_counts(op, counts):
    results = []
    for count in counts:
        tensor = torch.arange(1, count + 1) * (bagua.get_rank() + 1)
        bagua.allreduce_inplace(tensor, op)
        results.append(tensor)
    scalar = torch.tensor(bagua.get_rank() + 2)
    bagua.allreduce_inplace(scalar, op)
    return [*results, scalar]


@pytest.mark.parametrize("op", INTEGER_OPS, ids=lambda op: op.name)
def test_the_ranks_need_not_divide_the_number_of_elements(ranks, op):
    counts = [0, 1, 4, 31]
    for tensors in ranks(3, reduce_counts, op, counts):
        contributions = [[torch.arange(1, n + 1) * (r + 1) for r in range(3)] for n in counts]
        contributions.append([torch.tensor(r + 2) for r in range(3)])
        for held, mine in zip(tensors, contributions, strict=True):
            wanted = functools.reduce(FOLDS[op], mine)
            assert held.shape == wanted.shape
            assert torch.equal(held, wanted)


@training.with_group
def reduce_dtypes(dtypes):
    rank = bagua.get_rank()
    results = []
    for dtype in dtypes:
        tensor = numbers(rank, 2, dtype)
        bagua.allreduce_inplace(tensor)
        results.append(tensor)
    return results


def test_every_dtype_of_gloo_is_summed(ranks):
    dtypes = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.complex64,
        torch.complex128,
    ]
    for results in ranks(2, reduce_dtypes, dtypes):
        for dtype, held in zip(dtypes, results, strict=True):
            assert held.dtype == dtype
            assert held.tolist() == folded(2, dtype, ReduceOp.SUM).tolist()


@training.with_group
def reduce_booleans():
    rank = bagua.get_rank()
    results = []
    for op in (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR, ReduceOp.MAX, ReduceOp.MIN):
        tensor = torch.tensor([[False, False, True, True], [False, True, False, True]][rank])
        bagua.allreduce_inplace(tensor, op)
        results.append(tensor.tolist())
    return results


def test_booleans_are_combined_by_bits_and_by_order(ranks):
    either, both = [False, True, True, True], [False, False, False, True]
    unequal = [False, True, True, False]
    assert ranks(2, reduce_booleans) == [[either, both, unequal, either, both]] * 2


UNDEFINED = [
    (torch.float32, ReduceOp.BOR, "BOR works on bits of integers and booleans"),
    (torch.int64, ReduceOp.AVG, "AVG needs floating-point numbers"),
    (torch.complex64, ReduceOp.MIN, "only SUM and AVG are"),
    (torch.bool, ReduceOp.SUM, "booleans have no SUM"),
    (torch.int16, ReduceOp.SUM, "gloo cannot reduce torch.int16"),
]


@training.with_group
def reduce_what_is_undefined(cases):
    return [errors_of(dtype, op) for dtype, op, _ in cases]


def errors_of(dtype, op):
    tensor = torch.ones(4).to(dtype)
    calls = [
        lambda: bagua.allreduce(tensor, tensor, op),
        lambda: bagua.allreduce_inplace(tensor, op),
        lambda: communication.allreduce_coalesced_inplace([tensor], op),
        lambda: bagua.reduce(tensor, tensor.clone(), 0, op),
        lambda: bagua.reduce_inplace(tensor, 0, op),
        lambda: bagua.reduce_scatter(tensor, tensor[:2], op),
        lambda: bagua.reduce_scatter_inplace(tensor, op),
    ]
    errors = [training.error_of(call) for call in calls]
    works = torch.ones(2)
    bagua.allreduce_inplace(works)
    return errors, works.tolist()


def test_an_op_that_the_dtype_does_not_have_is_a_type_error(ranks):
    for results in ranks(2, reduce_what_is_undefined, UNDEFINED):
        for (errors, works), (_, _, message) in zip(results, UNDEFINED, strict=True):
            assert len(errors) == 7
            for error in errors:
                assert error.startswith("TypeError")
                assert message in error
            assert works == [2.0, 2.0]
