"""Eager collectives that reduce: every op in every form, against the same fold in one process."""

import functools
import itertools
import operator

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api import ReduceOp, communication
from support import training

SIZES = [1, 2, 3, 4]
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
OTHER_DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int32),
]
CASES = [
    *((torch.int64, op) for op in INTEGER_OPS),
    *((torch.float32, op) for op in FLOAT_OPS),
    *((dtype, ReduceOp.SUM) for dtype in OTHER_DTYPES),
]
COUNT = 3


def numbers(rank, size, dtype):
    """`size` parts of COUNT small numbers: sums and products of four are exact in 8 bits."""
    return ((torch.arange(size * COUNT) * (rank + 1)) % 4 + 1).to(dtype)


def folded(size, dtype, op):
    total = functools.reduce(FOLDS[op], [numbers(rank, size, dtype) for rank in range(size)])
    return total / size if op is ReduceOp.AVG else total


def reduced(mine, op, total):
    """For each collective its name, what it leaves on this rank, and what it must leave.

    mine: what this rank brings. total: the fold of all.
    """
    rank, root = bagua.get_rank(), bagua.get_world_size() - 1
    count = mine.numel() // bagua.get_world_size()
    part = total[rank * count : (rank + 1) * count]
    untouched = torch.full_like(mine, 7)
    sent, result = mine.clone(), untouched.clone()
    bagua.allreduce(sent, result, op)
    yield "allreduce", result, total
    result = untouched.clone()
    bagua.reduce(sent, result, root, op)
    yield "reduce", result, total if rank == root else untouched
    result = untouched[:count].clone()
    bagua.reduce_scatter(sent, result, op)
    yield "reduce_scatter", result, part
    yield "what was sent", sent, mine
    held = [mine.clone() for _ in range(5)]
    bagua.allreduce(held[0], held[0], op)
    yield "allreduce of one tensor", held[0], total
    bagua.allreduce_inplace(held[1], op)
    yield "allreduce_inplace", held[1], total
    communication.allreduce_coalesced_inplace([held[2][:1], held[2][1:].view(1, -1)], op)
    yield "allreduce_coalesced_inplace", held[2], total
    bagua.reduce_inplace(held[3], root, op)
    yield "reduce_inplace", held[3], total if rank == root else mine
    bagua.reduce_scatter_inplace(held[4], op)
    yield "reduce_scatter_inplace", held[4], torch.cat([part, mine[count:]])


@training.with_group
def reduce_all(size):
    for dtype, op in CASES:
        mine, total = numbers(bagua.get_rank(), size, dtype), folded(size, dtype, op)
        # Of whole numbers, which every dtype holds exactly.
        tolerances = {} if op is ReduceOp.AVG else {"rtol": 0, "atol": 0}
        for name, held, wanted in reduced(mine, op, total):
            torch.testing.assert_close(
                held,
                wanted,
                **tolerances,
                msg=lambda text, case=(name, dtype, op.name): f"{case}: {text}",
            )


def test_every_rank_holds_the_fold_of_all(ranks):
    for size in SIZES:
        ranks(size, reduce_all, size)


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


@training.with_group
def differences_from_torch(counts, dtypes):
    different = []
    for dtype, count in itertools.product(dtypes, counts):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            if dtype.is_complex and op is ReduceOp.MAX:
                continue
            mine = spread(count, dtype)
            for name, held, wanted in reduced(mine, op, reduced_by_torch(mine, op)):
                if not torch.equal(held, wanted):
                    different.append((name, dtype, count, op.name))
    return different


def test_floats_have_the_bits_of_torchs_all_reduce(ranks):
    long, counts = [720_000], [0, 12, 1200, 120_000]
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.complex64]
    for size in (2, 3, 4):
        assert ranks(size, differences_from_torch, long + counts, [torch.float32]) == [[]] * size
        assert ranks(size, differences_from_torch, counts, dtypes) == [[]] * size


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
