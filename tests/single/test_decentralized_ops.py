"""Averaged weights beside the weights, with all ranks or with one peer, on thread ranks."""

import pytest
import torch
from bagua import _C
from oracle import decentralized as oracle
from single.test_hierarchical import NODES
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


def counter(value=0):
    return torch.tensor(value)


def averaging(comm, mode, communications):
    """The in-place op between ranks."""
    if mode == "all":
        return _C.AllReduce(comm, _C.ReduceOp.AVG)
    return _C.Gossip(comm, communications, [1] * comm.size, _C.Scratch())


def run_rounds(comm, brought, make):
    """Averages `ROUNDS` times; returns what every round began with and gave, and the counter."""
    flat = brought[comm.rank].clone()
    peer_weight, communications = torch.full_like(flat, 7), counter()
    op = _C.AverageWeights(peer_weight, communications, make(comm, communications))
    rounds = []
    for _ in range(ROUNDS):
        before = flat.clone()
        op.run(flat)
        assert torch.equal(bits(flat), bits(before)), "the bucket is not touched"
        flat.copy_(peer_weight)
        rounds.append((before, peer_weight.clone()))
    return rounds, int(communications), op.describe()


def expect_oracle(results, mode, dtype, nodes=None):
    """Round by round, from what the ranks held, so that errors do not add up."""
    for k in range(ROUNDS):
        before = [[rounds[k][0].double()] for rounds, *_ in results]
        scale = torch.stack([weight for (weight,) in before]).abs().max(0).values
        expected = oracle.average(before, mode, k, nodes)
        for rank, (rounds, *_) in enumerate(results):
            error = (rounds[k][1].double() - expected[rank][0]).abs()
            allowed = TOLERANCE.get(dtype, 1e-6) * scale + ABSOLUTE
            assert (error <= allowed).all(), f"round {k}, rank {rank}"
    assert [count for _, count, _ in results] == [ROUNDS] * len(results)


@per_ranks
@per_dtype
@per_mode
def test_the_average_is_the_oracles_and_lies_beside_the_bucket(mode, dtype, n):
    for numel in SIZES:
        brought = inputs(n, numel, dtype)
        results = run_thread_ranks(
            n, run_rounds, brought, lambda comm, count: averaging(comm, mode, count)
        )
        expect_oracle(results, mode, dtype)
        if mode == "all":
            assert_same_bits([rounds[0][1] for rounds, *_ in results])


@per_ranks
@over(numel=[1, 1000, MORE_THAN_A_PIECE])
def test_a_pair_holds_the_same_bits_which_are_half_the_sum(n, numel):
    brought = inputs(n, numel, torch.float32)
    results = run_thread_ranks(
        n, run_rounds, brought, lambda comm, count: averaging(comm, "shift_one", count)
    )
    for k in range(ROUNDS):
        for rank, peer in enumerate(oracle.shift_one_pairs(n, k)):
            own, theirs = results[rank][0][k][0], results[peer][0][k][0]
            got = results[rank][0][k][1]
            assert torch.equal(bits(got), bits((own + theirs) / 2))


def run_between_nodes(nodes, mode, brought):
    leaders = _C.leaders(nodes)
    sizes = [nodes.count(nodes[leader]) for leader in leaders]
    between_nodes = _C.ThreadHub(len(leaders), 20.0)
    in_node = {leader: _C.ThreadHub(nodes.count(nodes[leader]), 20.0) for leader in leaders}

    def make(comm, communications):
        members = _C.node_members(nodes, comm.rank)
        node = _C.ThreadCommunicator(in_node[members[0]], members.index(comm.rank))
        inner = None
        if comm.rank in leaders:
            among = _C.ThreadCommunicator(between_nodes, leaders.index(comm.rank))
            inner = averaging(among, mode, communications)
            if mode == "shift_one":
                inner = _C.Gossip(among, communications, sizes, _C.Scratch())
        ranks = len(nodes) if mode == "all" else len(members) * len(leaders)
        return _C.Hierarchical(node, inner, ranks, len(leaders), _C.ReduceOp.AVG)

    return run_thread_ranks(len(nodes), run_rounds, brought, make)


@per_nodes
@per_mode
def test_nodes_of_different_sizes_weigh_as_many_ranks_as_they_have(mode, nodes):
    for numel in (31, 4096):
        brought = inputs(len(nodes), numel, torch.float32)
        results = run_between_nodes(nodes, mode, brought)
        expect_oracle(results, mode, torch.float32, nodes)
        for rounds in zip(*(rounds for rounds, *_ in results), strict=True):
            for node in set(nodes):
                assert_same_bits([r[1] for r, n in zip(rounds, nodes, strict=True) if n == node])


@per_mode
@over(bad=BAD_VALUES.values())
def test_a_bad_value_reaches_the_peers_and_no_other_element(mode, bad):
    brought = inputs(4, 100, torch.float32)
    brought[1][3] = bad
    results = run_thread_ranks(
        4, run_rounds, brought, lambda comm, count: averaging(comm, mode, count)
    )
    reached = [not rounds[0][1][3].isfinite() for rounds, *_ in results]
    assert reached == ([True] * 4 if mode == "all" else [False, True, False, True])
    for rounds, *_ in results:
        assert rounds[0][1].isfinite().sum() >= 99


def alone():
    return _C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0)


class Refuses(Exception):
    pass


def test_a_communication_that_failed_is_not_counted():
    def refuse(name):
        raise Refuses("no")

    communications = counter(5)
    op = _C.AverageWeights(torch.zeros(3), communications, _C.PythonOp(refuse))
    with pytest.raises(Exception, match="no"):
        op.run(torch.ones(3))
    assert int(communications) == 5


def test_invalid_arguments_are_refused_and_named():
    exact = _C.AllReduce(alone(), _C.ReduceOp.AVG)
    with pytest.raises(ValueError, match="communications must be one int64"):
        _C.AverageWeights(torch.zeros(3), torch.zeros(1), exact)
    with pytest.raises(ValueError, match="communications must be one int64"):
        _C.Gossip(alone(), torch.zeros(2, dtype=torch.int64), [1], _C.Scratch())
    with pytest.raises(ValueError, match="one dimension"):
        _C.AverageWeights(torch.zeros(2, 2), counter(), exact)
    with pytest.raises(ValueError, match="a weight above 0 for each of its 1 members"):
        _C.Gossip(alone(), counter(), [1, 1], _C.Scratch())
    with pytest.raises(ValueError, match="a weight above 0"):
        _C.Gossip(alone(), counter(), [0], _C.Scratch())
    flat = torch.zeros(3)
    for peer_weight in (torch.zeros(4), torch.zeros(3, dtype=torch.float16), flat):
        with pytest.raises(ValueError, match=r"'eager': peer_weight .* memory of its own"):
            _C.AverageWeights(peer_weight, counter(), exact).run(flat)


def test_ops_describe_themselves():
    gossip = _C.Gossip(alone(), counter(), [1], _C.Scratch())
    around = _C.AverageWeights(torch.zeros(3), counter(), gossip)
    assert around.describe() == "AverageWeights(Gossip(shift_one, ranks 1))"
