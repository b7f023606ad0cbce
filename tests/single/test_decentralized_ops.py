"""Averaged weights beside the weights, with all ranks or with one peer, on thread ranks."""

from functools import partial

import pytest
import torch
from bagua import _C
from bagua._core.group.connections import by_node
from oracle import decentralized as oracle
from single.test_hierarchical import NODES, through_leaders
from support.cases import over
from support.threads.op_ranks import (
    BAD_VALUES,
    MORE_THAN_A_PIECE,
    SIZES,
    assert_same_bits,
    bits,
    inputs,
    per_dtype,
    per_ranks,
)
from support.threads.thread_ranks import run_thread_ranks

ROUNDS = 4
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float64: 1e-12}
ABSOLUTE = 4 * 2**-24  # steps of f16's subnormal numbers
per_mode = over(mode=["all", "shift_one"])
per_nodes = over(nodes=NODES.values())


def averaging(comm, mode, communications, sizes=None):
    """The in-place op between members of these sizes."""
    if mode == "all":
        return _C.AllReduce(comm, _C.ReduceOp.AVG)
    return _C.Gossip(comm, communications, sizes or [1] * comm.size, _C.Scratch())


def run_rounds(comm, brought, make):
    """Averages `ROUNDS` times; returns what every round began with and gave."""
    flat = brought[comm.rank].clone()
    peer_weight, communications = torch.full_like(flat, 7), torch.tensor(0)
    op = _C.AverageWeights(peer_weight, communications, make(comm, communications=communications))
    rounds = []
    for _ in range(ROUNDS):
        before = flat.clone()
        op.run(flat)
        assert torch.equal(bits(flat), bits(before)), "the bucket is not touched"
        flat.copy_(peer_weight)
        rounds.append((before, peer_weight.clone()))
    assert int(communications) == ROUNDS
    return rounds


def run_among_all(mode, brought):
    make = partial(averaging, mode=mode)
    return run_thread_ranks(len(brought), partial(run_rounds, make=make), brought)


def expect_oracle(results, mode, dtype, nodes=None):
    """Round by round, from what the ranks held, so that errors do not add up."""
    for k in range(ROUNDS):
        before = [[rounds[k][0].double()] for rounds in results]
        scale = torch.stack([weight for (weight,) in before]).abs().max(0).values
        expected = oracle.average(before, mode, k, nodes)
        for rank, rounds in enumerate(results):
            error = (rounds[k][1].double() - expected[rank][0]).abs()
            allowed = TOLERANCE.get(dtype, 1e-6) * scale + ABSOLUTE
            assert (error <= allowed).all(), f"round {k}, rank {rank}"


def expect_half_the_sum(results):
    """A pair holds the same bits."""
    for k in range(ROUNDS):
        for rank, peer in enumerate(oracle.shift_one_pairs(len(results), k)):
            own, theirs = results[rank][k][0], results[peer][k][0]
            assert torch.equal(bits(results[rank][k][1]), bits((own + theirs) / 2))


@per_ranks
@per_dtype
@per_mode
def test_the_average_is_the_oracles_and_lies_beside_the_bucket(mode, dtype, n):
    for numel in [*SIZES, MORE_THAN_A_PIECE]:
        results = run_among_all(mode, inputs(n, numel, dtype))
        expect_oracle(results, mode, dtype)
        if mode == "all":
            assert_same_bits([rounds[0][1] for rounds in results])
        elif dtype == torch.float32:
            expect_half_the_sum(results)


def run_between_nodes(nodes, mode, brought):
    through, sizes = through_leaders(nodes), [len(node) for node in by_node(nodes)]

    def make(comm, communications):
        own = nodes.count(nodes[comm.rank])
        ranks = len(nodes) if mode == "all" else own * len(sizes)
        inner = partial(averaging, mode=mode, communications=communications, sizes=sizes)
        return through(comm, inner, ranks, _C.ReduceOp.AVG)

    return run_thread_ranks(len(nodes), partial(run_rounds, make=make), brought)


@per_nodes
@per_mode
def test_nodes_of_different_sizes_weigh_as_many_ranks_as_they_have(mode, nodes):
    for numel in (31, 4096):
        brought = inputs(len(nodes), numel, torch.float32)
        results = run_between_nodes(nodes, mode, brought)
        expect_oracle(results, mode, torch.float32, nodes)
        for rounds in zip(*results, strict=True):
            for node in set(nodes):
                assert_same_bits([r[1] for r, n in zip(rounds, nodes, strict=True) if n == node])


@per_mode
@over(bad=BAD_VALUES.values())
def test_a_bad_value_reaches_the_peers_and_no_other_element(mode, bad):
    brought = inputs(4, 100, torch.float32)
    brought[1][3] = bad
    results = run_among_all(mode, brought)
    reached = [not rounds[0][1][3].isfinite() for rounds in results]
    assert reached == ([True] * 4 if mode == "all" else [False, True, False, True])
    for rounds in results:
        assert rounds[0][1].isfinite().sum() >= 99


class Refuses(Exception):
    pass


def test_a_communication_that_failed_is_not_counted():
    def refuse(name):
        raise Refuses("no")

    communications = torch.tensor(5)
    op = _C.AverageWeights(torch.zeros(3), communications, _C.PythonOp(refuse))
    with pytest.raises(Exception, match="no"):
        op.run(torch.ones(3))
    assert int(communications) == 5
