"""Ops on buckets of a GPU that thread ranks share: the bits, or nearly, of the same op on CPU."""

import torch
from bagua import _C
from support.devices import over_on_each_device
from support.threads.low_rank_ranks import NUMEL, Rank, gradients
from support.threads.op_ranks import (
    CODECS,
    DTYPES,
    OPS,
    assert_same_bits,
    inputs,
    step_of,
)
from support.threads.sparse_ranks import k_of, make, memory_of
from support.threads.thread_ranks import run_thread_ranks

SIZES = [1, 31, 14337, 1_200_007]
ROUNDS = 3


def copy_on_cpu(tensor):
    """A copy where the tensor is on CPU too: the op goes on to change it."""
    return tensor.to("cpu", copy=True)


def run_compressed(n, codec, op, brought, device):
    kind = torch.device(device).type

    def run(comm):
        flat = brought[comm.rank].to(device, copy=True)
        made = _C.CompressedAllReduce(comm, _C.make_codec(codec, kind), _C.Scratch(), OPS[op])
        made.run(flat)
        return flat.cpu()

    return run_thread_ranks(n, run)


#: Means of powers of two: on a GPU torch multiplies with 1 / n, which is exact for them alone.
EXACT_CASES = [
    *((3, "sum", torch.float32, numel) for numel in SIZES),
    *((n, op, dtype, 14337) for n in (1, 2, 4) for op in OPS for dtype in DTYPES.values()),
]


@over_on_each_device(codec=CODECS, case=EXACT_CASES)
def test_compressed_sums_and_means_have_the_bits_of_the_cpu(codec, case, device):
    n, op, dtype, numel = case
    brought = inputs(n, numel, dtype)
    results = run_compressed(n, codec, op, brought, device)
    assert_same_bits([*results, run_compressed(n, codec, op, brought, "cpu")[0]])


@over_on_each_device(codec=CODECS)
def test_compressed_means_of_three_are_equal_on_all_ranks_and_near_those_of_the_cpu(codec, device):
    brought = inputs(3, 14337, torch.float32)
    results = run_compressed(3, codec, "mean", brought, device)
    assert_same_bits(results)
    # A third is rounded: a value next to an edge gets the next level of its range.
    on_cpu = run_compressed(3, codec, "mean", brought, "cpu")[0]
    largest = on_cpu.abs().max()
    level = step_of(codec)
    assert (results[0] - on_cpu).abs().max() <= level * largest
    assert ((results[0] - on_cpu) != 0).float().mean() < 0.01


@over_on_each_device(codec=CODECS, bad=[float("nan"), float("inf")])
def test_a_bad_value_reaches_all_ranks(codec, bad, device):
    brought = inputs(2, 3 * 5000, torch.float32)
    brought[1][4096] = bad
    results = run_compressed(2, codec, "mean", brought, device)
    expected = run_compressed(2, codec, "mean", brought, "cpu")[0]
    for result in results:
        assert torch.equal(result.isfinite(), expected.isfinite())
        assert not result.isfinite().all()


def run_gossip(n, codec, start, added, device):
    """By rank and round: weights and replicas, on CPU."""

    def run(comm):
        replicas = [start.float().to(device, copy=True) for _ in range(3)]
        made = _C.make_codec(codec, torch.device(device).type)
        op = _C.CompressedGossip(comm, made, _C.Scratch(), *replicas, 1 / 3, 1 / 3)
        flat, seen = start.to(device, copy=True), []
        for k, of_ranks in enumerate(added):
            flat += of_ranks[comm.rank].to(device)
            op.run(flat, step=k + 1)
            seen.append([copy_on_cpu(tensor) for tensor in (flat, *replicas)])
        return seen

    return run_thread_ranks(n, run)


@over_on_each_device(codec=CODECS, n=[2, 3])
def test_gossip_keeps_replicas_that_are_the_neighbours_to_the_bit(codec, n, device):
    start = inputs(1, 14337, torch.float32, salt=99)[0]
    added = [[0.1 * u for u in inputs(n, 14337, torch.float32, salt=k)] for k in range(ROUNDS)]
    results = run_gossip(n, codec, start, added, device)
    for k in range(ROUNDS):
        for rank in range(n):
            _, own, _, _ = results[rank][k]
            assert_same_bits([own, results[rank - 1][k][3], results[(rank + 1) % n][k][2]])
    on_cpu = run_gossip(n, codec, start, added, "cpu")
    for ours, theirs in zip(results, on_cpu, strict=True):
        # ATen may contract a product and a sum on a GPU: a code next to an edge moves by a level.
        level = max(2e-2, step_of(codec))
        assert (ours[0][0] - theirs[0][0]).abs().max() <= level * start.abs().max()


@over_on_each_device(name=["all_reduce", "momentum"], dtype=DTYPES.values())
def test_exact_ops_are_near_those_of_the_cpu(name, dtype, device):
    brought = inputs(3, 14337, dtype)

    def run(comm, where):
        flat = brought[comm.rank].to(where, copy=True)
        if name == "all_reduce":
            _C.AllReduce(comm, _C.ReduceOp.AVG).run(flat)
        else:
            memories = [torch.ones(14336 // 2, dtype=dtype, device=where) for _ in range(2)]
            betas = torch.tensor([0.9, 0.5], dtype=torch.float64)
            places = [0, 14336 // 2], [[1], [1]]
            _C.UpdateMomentum(memories, *places, betas, _C.Scratch()).run(flat)
        return flat.cpu()

    results = run_thread_ranks(3, run, device)
    for ours, theirs in zip(results, run_thread_ranks(3, run, "cpu"), strict=True):
        # The order of three terms, and one rounding more or less of each.
        near = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near * brought[0].abs().max())


@over_on_each_device(dtype=DTYPES.values())
def test_sparse_means_choose_the_elements_of_the_cpu(dtype, device):
    rounds = [inputs(3, 5003, dtype, salt=17 * step) for step in range(ROUNDS)]

    def run(comm, where):
        memory = memory_of(5003, dtype, device=where)
        op = make(comm, "top-k", 5003, k_of(5003), memory)
        seen = []
        for step, brought in enumerate(rounds):
            flat = brought[comm.rank].to(where, copy=True)
            op.run(flat, step=step + 1)
            seen.append((copy_on_cpu(flat), copy_on_cpu(memory.value(0))))
        return seen

    results, on_cpu = run_thread_ranks(3, run, device), run_thread_ranks(3, run, "cpu")
    for step in range(ROUNDS):
        assert_same_bits([seen[step][0] for seen in results])
        near = {"rtol": 8 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
        torch.testing.assert_close(results[0][step][0], on_cpu[0][step][0], **near)
        for ours, theirs in zip(results, on_cpu, strict=True):
            assert torch.equal(ours[step][1] == 0, theirs[step][1] == 0), "the same elements"


@over_on_each_device(dtype=DTYPES.values())
def test_low_rank_means_are_equal_on_all_ranks_and_near_those_of_the_cpu(dtype, device):
    brought = gradients(3, ROUNDS, dtype=dtype)

    def run(comm, where):
        rank = Rank(comm, dtype=dtype, device=where)
        return [rank.run(g.to(where), step + 1).cpu() for step, g in enumerate(brought[comm.rank])]

    results, on_cpu = run_thread_ranks(3, run, device), run_thread_ranks(3, run, "cpu")
    for step in range(ROUNDS):
        assert_same_bits([seen[step] for seen in results])
        assert results[0][step].numel() == NUMEL
    # Sums of 50 products in another order, through an orthonormalisation in f64; the tensor cores'
    # 10 bits are not used for f32 unless a user asks for them.
    near = {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 3e-2)
    first, theirs = results[0][0], on_cpu[0][0]
    assert (first - theirs).abs().max() <= near * theirs.abs().max()
