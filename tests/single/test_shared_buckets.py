"""Buckets that ranks of one host reduce where they lie: bits, fallbacks, lifetime, fork."""

import gc
import os
from pathlib import Path

import pytest
import torch
from bagua import _C
from support.threads.shared_ranks import is_shared, run_shared_ranks, share
from support.threads.thread_ranks import run_thread_ranks, run_threads

OPS = [_C.ReduceOp.SUM, _C.ReduceOp.AVG]


def run(op, flat):
    op.run(flat, 1, 1.0, "bucket")


def reduced_twice(comm, stack, op):
    flat = stack[comm.rank].clone()
    reduce = _C.AllReduce(comm, op, flat)
    run(reduce, flat)
    flat += comm.rank
    run(reduce, flat)
    return flat, is_shared(flat)


def reduced_elsewhere_twice(comm, stack, op):
    flat = stack[comm.rank].clone()
    comm.all_reduce(flat, op)
    flat += comm.rank
    comm.all_reduce(flat, op)
    return flat


@pytest.mark.parametrize("numel", [1, 31, 40001, 2 * (1 << 19) + 4099], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [2, 3, 7], ids=lambda n: f"{n}-ranks")
def test_a_bucket_is_reduced_in_place_to_the_bits_of_values_joined_in_rank_order(n, dtype, numel):
    stack = torch.randn(n, numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    for op in OPS:
        expected = run_thread_ranks(n, reduced_elsewhere_twice, stack, op)[0]
        for flat, shared in run_shared_ranks(n, reduced_twice, stack, op):
            assert shared
            assert torch.equal(flat, expected)


def reduced_complex(comm):
    flat = torch.full((9001,), complex(comm.rank + 1, -1))
    run(_C.AllReduce(comm, _C.ReduceOp.SUM, flat), flat)
    return set(flat.tolist()), is_shared(flat)


def test_complex_buckets_are_reduced_as_their_parts():
    assert run_shared_ranks(2, reduced_complex) == [({3 - 2j}, True)] * 2


def several_buckets(comm):
    flats = [torch.full((size,), float(comm.rank + 1)) for size in (7, 30000, 500000)]
    views = [flat[2:5] for flat in flats]
    ops = [_C.AllReduce(comm, _C.ReduceOp.SUM, flat) for flat in flats]
    for index in (2, 0, 1, 0):
        run(ops[index], flats[index])
    total = torch.ones(3)
    comm.all_reduce(total, _C.ReduceOp.SUM)
    return [view.tolist() for view in views], total.tolist()


def test_buckets_of_one_communicator_and_its_other_calls_take_turns():
    sums = [[6.0] * 3, [3.0] * 3, [3.0] * 3]  # the first one twice
    assert run_shared_ranks(2, several_buckets) == [(sums, [2.0] * 3)] * 2


def part_on_rank_one(comm):
    flat = torch.arange(80000.0)[:40000] if comm.rank == 1 else torch.arange(40000.0)
    reduce = _C.AllReduce(comm, _C.ReduceOp.SUM, flat)
    run(reduce, flat)
    whole = torch.ones(90000)
    again = _C.AllReduce(comm, _C.ReduceOp.SUM, whole)
    run(again, whole)
    return flat[:20].tolist(), whole.unique().tolist(), is_shared(whole)


def test_a_rank_that_cannot_share_a_bucket_decides_for_all():
    doubled = [2.0 * i for i in range(20)]
    assert run_shared_ranks(2, part_on_rank_one) == [(doubled, [2.0], True)] * 2


def of_different_sizes(comm):
    flat = torch.ones(100000 + comm.rank)
    with pytest.raises(_C.BaguaMismatchError, match=r"all_reduce of 10000[01] float32"):
        run(_C.AllReduce(comm, _C.ReduceOp.SUM, flat), flat)


def in_another_order(comm):
    first, second = torch.ones(80000), torch.ones(80000)
    ops = [_C.AllReduce(comm, _C.ReduceOp.SUM, flat) for flat in (first, second)]
    with pytest.raises(_C.BaguaMismatchError, match=r"in place of 80000 float32 .* of bucket [12]"):
        run(ops[comm.rank], (first, second)[comm.rank])


def of_another_op(comm):
    flat = torch.ones(80000)
    reduce = _C.AllReduce(comm, _C.ReduceOp.SUM, flat)
    with pytest.raises(_C.BaguaError, match="made for another bucket"):
        run(reduce, torch.ones(80000))


@pytest.mark.parametrize("reduce", [of_different_sizes, in_another_order, of_another_op])
def test_buckets_that_do_not_match_are_an_error(reduce):
    assert run_shared_ranks(2, reduce) == [None] * 2


def test_a_bucket_outlives_its_communicator_and_its_memory_goes_with_it():
    communicators = [communicator for communicator, _ in share(2)]
    flats = [torch.full((1 << 20,), float(rank)) for rank in range(2)]

    def reduce(rank):
        run(_C.AllReduce(communicators[rank], _C.ReduceOp.SUM, flats[rank]), flats[rank])

    run_threads(2, reduce)
    communicators.clear()
    gc.collect()
    assert [flat.sum().item() for flat in flats] == [1 << 20] * 2
    assert all(is_shared(flat) for flat in flats)
    del reduce
    flats.clear()
    gc.collect()
    assert "memfd:bagua" not in Path("/proc/self/maps").read_text()


def test_a_forked_child_writes_into_memory_of_its_own():
    communicators = [communicator for communicator, _ in share(2)]
    flats = [torch.ones(50000) for _ in range(2)]
    ops = [None, None]

    def make(rank):
        ops[rank] = _C.AllReduce(communicators[rank], _C.ReduceOp.SUM, flats[rank])

    run_threads(2, make)
    child = os.fork()
    if child == 0:
        seen = flats[0].sum().item() == 50000
        flats[0].fill_(7)
        os._exit(0 if seen and flats[0][0].item() == 7 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert flats[0].unique().tolist() == [1.0]
    run_threads(2, lambda rank: run(ops[rank], flats[rank]))
    assert [flat.unique().tolist() for flat in flats] == [[2.0]] * 2
