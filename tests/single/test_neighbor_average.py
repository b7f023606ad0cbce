"""The weighted mean with neighbours, on thread ranks, for every graph of up to five of them."""

import time

import torch
from bagua import _C
from mlbench_core.aggregation.pytorch.decentralized import metropolis_weights
from oracle import neighbor_average as oracle
from support import graphs
from support.cases import over
from support.threads.op_ranks import (
    BAD_VALUES,
    DTYPES,
    SIZES,
    assert_same_bits,
    bits,
    inputs,
    per_dtype,
    run_op,
)
from support.threads.thread_ranks import run_thread_ranks

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-13}
MORE_THAN_A_SEGMENT = 8 * 131072 + 2048 + 5
PATH = [[1], [0, 2], [1, 3], [2]]
GRAPHS = {
    "alone": [[]],
    "pair": [[1], [0]],
    "ring-of-3": graphs.ring(3),
    "ring-of-5": graphs.ring(5),
    "complete-of-4": graphs.complete(4),
    "star-of-5": graphs.star(5, hub=2),
    "path-of-4": PATH,
    "two-parts": [[1], [0], [3, 4], [2], [2], []],
}


def make_average(comm, graph):
    return _C.NeighborAverage(comm, *metropolis_weights(comm.rank, graph), _C.Scratch())


def averaged(graph, brought):
    return run_op(len(graph), lambda comm: make_average(comm, graph), brought)


def expect_oracle(results, graph, brought, dtype):
    expected = oracle.average(oracle.metropolis(graph), brought)
    scale = torch.stack([x.double() for x in brought]).abs().max(0).values
    for rank, (result, value) in enumerate(zip(results, expected, strict=True)):
        assert result.dtype == dtype
        error = (result.double() - value).abs()
        assert (error <= TOLERANCE.get(dtype, 3e-7) * scale + 1e-7).all(), f"rank {rank}"


@over(graph=GRAPHS.values(), dtype=DTYPES.values())
def test_the_average_is_the_oracles(graph, dtype):
    for numel in [*SIZES, *([MORE_THAN_A_SEGMENT] if graph == PATH else [])]:
        brought = inputs(len(graph), numel, dtype)
        expect_oracle(averaged(graph, brought), graph, brought, dtype)


@per_dtype
@over(n=[2, 3, 4, 7])
def test_on_a_complete_graph_ranks_hold_the_same_bits(n, dtype):
    for numel in SIZES:
        assert_same_bits(averaged(graphs.complete(n), inputs(n, numel, dtype)))


@over(n=[3, 5, 6, 7], dtype=[torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single_so_that_constants_stay(n, dtype):
    """A seventh, rounded to half precision, times seven is not one."""
    for graph in (graphs.complete(n), graphs.star(n), graphs.ring(n)):
        brought = [torch.tensor([1.0, 3.14, 1e-3, 60000.0]).to(dtype)] * n
        for result in averaged(graph, brought):
            assert torch.equal(bits(result), bits(brought[0]))


@over(size=[1, 2, 3, 4, 5])
def test_every_graph_is_averaged_without_deadlock_and_keeps_the_mean(size):
    """2, 8, 64 and 1024 graphs, each on ranks that run all of them one after the other, with no
    barrier between: a rank may be several graphs ahead of one that it is not connected to.
    """
    graphs = list(oracle.all_graphs(size))
    assert len({str(graph) for graph in graphs}) == 2 ** (size * (size - 1) // 2)
    brought = inputs(size, 6, torch.float64)

    def run(comm):
        results = []
        for graph in graphs:
            flat = brought[comm.rank].clone()
            make_average(comm, graph).run(flat)
            results.append(flat)
        return torch.stack(results)

    start = time.monotonic()
    results = torch.stack(run_thread_ranks(size, run, timeout=5.0))  # rank, graph, element
    assert time.monotonic() - start < 20
    matrices = torch.stack([oracle.metropolis(graph) for graph in graphs])
    expected = torch.einsum("gij,jn->ign", matrices, torch.stack(brought))
    torch.testing.assert_close(results, expected, rtol=1e-13, atol=1e-13)
    mean = torch.stack(brought).mean(0).expand_as(results[0])
    torch.testing.assert_close(results.mean(0), mean, rtol=1e-13, atol=1e-13)


@over(bad=BAD_VALUES.values())
def test_a_bad_value_reaches_the_neighbours_and_no_other_element(bad):
    brought = inputs(5, 100, torch.float32)
    brought[1][3] = bad
    results = averaged(graphs.ring(5), brought)
    assert [not result[3].isfinite() for result in results] == [True, True, True, False, False]
    assert all(result.isfinite().sum() >= 99 for result in results)


def test_neighbours_may_come_in_any_order():
    brought = inputs(3, 31, torch.float32)
    results = run_op(
        3,
        lambda comm: _C.NeighborAverage(
            comm,
            0.5,
            [((comm.rank + 2) % 3, 0.125), ((comm.rank + 1) % 3, 0.375)],
            _C.Scratch(),
        ),
        brought,
    )
    for rank, result in enumerate(results):
        after, before = brought[(rank + 1) % 3], brought[(rank + 2) % 3]
        torch.testing.assert_close(result, brought[rank] / 2 + after * 0.375 + before * 0.125)
