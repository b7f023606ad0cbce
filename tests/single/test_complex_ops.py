"""Ops of exact gradients on complex buckets: the bits that the pairs of reals would give."""

import math

import torch
from bagua import _C
from single.test_hierarchical import NODES, run_hierarchical
from support.cases import over
from support.threads.op_ranks import (
    BAD_VALUES,
    OPS,
    SIZES,
    assert_same_bits,
    inputs,
    per_op,
    per_ranks,
    run_op,
)

REALS = {"c64": torch.float32, "c128": torch.float64}
per_real = over(real=REALS.values())


def complex_of(reals):
    return [torch.view_as_complex(part.view(-1, 2).clone()) for part in reals]


@per_real
@per_op
@per_ranks
def test_all_reduce_of_complex_numbers_is_that_of_their_parts(n, op, real):
    for numel in SIZES:
        reals = inputs(n, 2 * numel, real)
        expected = run_op(n, lambda comm: _C.AllReduce(comm, OPS[op]), reals)
        results = run_op(n, lambda comm: _C.AllReduce(comm, OPS[op]), complex_of(reals))
        assert torch.equal(torch.view_as_real(results[0]).view(-1), expected[0])
        assert_same_bits([torch.view_as_real(result) for result in results])


@per_real
@per_op
@over(nodes=NODES.values())
def test_between_nodes_too(nodes, op, real):
    for numel in SIZES:
        reals = inputs(len(nodes), 2 * numel, real)
        expected = run_hierarchical(nodes, "exact", op, reals)[0][0]
        results = [flat for flat, _ in run_hierarchical(nodes, "exact", op, complex_of(reals))]
        close = {"rtol": 4 * torch.finfo(real).eps, "atol": 0.0}
        torch.testing.assert_close(torch.view_as_real(results[0]).view(-1), expected, **close)
        assert_same_bits([torch.view_as_real(result) for result in results])


@per_real
@over(part=[0, 1], bad=BAD_VALUES.values())
def test_a_bad_part_reaches_every_rank_and_is_counted(real, bad, part):
    reals = inputs(3, 62, real)
    good = complex_of(reals)
    reals[2][40 + part] = bad
    for brought, expected in ((good, 0), (complex_of(reals), 1)):
        counters = [_C.NonFiniteRounds() for _ in range(3)]

        def counted(comm, counters=counters):
            reduce = _C.AllReduce(comm, OPS["mean"])
            return _C.CountNonFinite(reduce, counters[comm.rank])

        results = run_op(3, counted, brought)
        assert [counter.count for counter in counters] == [expected] * 3
        bad_parts = [~torch.view_as_real(r).isfinite() for r in results]
        assert [int(parts.sum()) for parts in bad_parts] == [expected] * 3
        assert all(bool(parts[20, part]) == bool(expected) for parts in bad_parts)


def test_one_rank_alone_keeps_its_bits():
    flat = torch.tensor([1 + 2j, complex(math.nan, math.inf)])
    (result,) = run_op(1, lambda comm: _C.AllReduce(comm, OPS["mean"]), [flat])
    assert torch.equal(torch.view_as_real(result)[0], torch.view_as_real(flat)[0])
