"""Exact inside a node, another op between nodes, on thread ranks."""

import pytest
import torch
from bagua import _C
from support.cases import over
from support.threads.op_ranks import (
    BAD_NUMEL,
    BAD_PLACES,
    BAD_VALUES,
    CODECS,
    OPS,
    SIZES,
    assert_same_bits,
    inputs,
    make_op,
    per_codec,
    per_dtype,
    per_op,
    step_of,
)
from support.threads.thread_ranks import run_thread_ranks

NODES = {
    "one-rank": [0],
    "one-node": [0, 0, 0],
    "two-nodes-of-two": [0, 0, 1, 1],
    "nodes-of-2-and-1": [0, 0, 1],
    "nodes-of-1-and-3": [0, 1, 1, 1],
    "nodes-of-3-1-and-3": [0, 0, 0, 1, 2, 2, 2],
    "interleaved-nodes": [0, 1, 0, 1, 0],
}


WAYS = over(way=["leaders", "sharded"])


def run(way, nodes, kind, op, brought):
    return {"leaders": run_hierarchical, "sharded": run_sharded}[way](nodes, kind, op, brought)


def run_sharded(nodes, kind, op, brought):
    """Share s is of member s mod n of each node of n ranks."""
    members = [_C.node_members(nodes, leader) for leader in _C.leaders(nodes)]
    shares = max(map(len, members)) if len(members) > 1 else 0
    in_node = {node[0]: _C.ThreadHub(len(node), 20.0) for node in members}
    between_nodes = [_C.ThreadHub(len(members), 20.0) for _ in range(shares)]

    def run(comm):
        mine = _C.node_members(nodes, comm.rank)
        node = _C.ThreadCommunicator(in_node[mine[0]], mine.index(comm.rank))
        inner = []
        for share, hub in enumerate(between_nodes):
            ranks = [node[share % len(node)] for node in members]
            if comm.rank in ranks:
                between = _C.ThreadCommunicator(hub, ranks.index(comm.rank))
                inner.append(make_op(between, kind, op))
            else:
                inner.append(None)
        sharded = _C.ShardedHierarchical(
            node, inner, _C.Scratch(), len(nodes), len(members), OPS[op]
        )
        flat = brought[comm.rank].clone()
        sharded.run(flat)
        return flat, sharded.describe()

    return run_thread_ranks(len(nodes), run)


def run_hierarchical(nodes, kind, op, brought):
    leaders = _C.leaders(nodes)
    between_nodes = _C.ThreadHub(len(leaders), 20.0)
    in_node = {leader: _C.ThreadHub(nodes.count(nodes[leader]), 20.0) for leader in leaders}

    def run(comm):
        members = _C.node_members(nodes, comm.rank)
        node = _C.ThreadCommunicator(in_node[members[0]], members.index(comm.rank))
        inner = None
        if comm.rank in leaders:
            among_leaders = _C.ThreadCommunicator(between_nodes, leaders.index(comm.rank))
            inner = make_op(among_leaders, kind, op)
        hierarchical = _C.Hierarchical(node, inner, len(nodes), len(leaders), OPS[op])
        flat = brought[comm.rank].clone()
        hierarchical.run(flat)
        return flat, hierarchical.describe()

    return run_thread_ranks(len(nodes), run)


@WAYS
@per_dtype
@per_op
@over(nodes=NODES.values())
def test_hierarchical_gives_the_mean_over_all_ranks_for_unequal_nodes(nodes, op, dtype, way):
    n = len(nodes)
    tolerance = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float64: 1e-12}.get(dtype, 1e-5)
    for numel in SIZES:
        brought = inputs(n, numel, dtype)
        results = [flat for flat, _ in run(way, nodes, "exact", op, brought)]
        assert_same_bits(results)
        stack = torch.stack(brought).double()
        divisor = n if op == "mean" else 1
        error = (results[0].double() - stack.sum(0) / divisor).abs()
        assert (error <= tolerance * stack.abs().sum(0) / divisor).all()


@WAYS
@per_codec
@over(nodes=NODES.values())
def test_hierarchical_compresses_between_nodes_only(nodes, codec, way):
    n, numel = len(nodes), 4096
    generator = torch.Generator().manual_seed(n)
    brought = [torch.rand(numel, generator=generator) * 2 - 1 for _ in range(n)]
    results = [flat for flat, _ in run(way, nodes, codec, "mean", brought)]
    assert_same_bits(results)
    exact = torch.stack(brought).double().mean(0)
    error = (results[0] - exact).abs().max()
    one_node = len(set(nodes)) == 1
    # A leader's value is its node's mean times node_size * nodes / ranks, here at most 9/7 in size.
    step = step_of(codec)
    assert error <= (1e-6 if one_node else 2 * step)
    assert one_node or error > 0


@WAYS
@over(kind=["exact", *CODECS], bad=BAD_VALUES.values())
def test_a_bad_value_passes_through_hierarchical(kind, bad, way):
    nodes = [0, 0, 1]
    for culprit in range(3):
        for place, index in BAD_PLACES.items():
            brought = inputs(3, BAD_NUMEL, torch.float32)
            brought[culprit][index] = bad
            results = [flat for flat, _ in run(way, nodes, kind, "mean", brought)]
            assert_same_bits(results)
            assert not results[0][index].isfinite(), f"{place}, rank {culprit}"


def test_shares_belong_to_the_ranks_that_have_their_ops():
    alone = _C.ThreadCommunicator(_C.ThreadHub(1, 20.0), 0)
    op = make_op(alone, "exact", "mean")
    arguments = (_C.Scratch(), 2, 2, _C.ReduceOp.AVG)
    with pytest.raises(ValueError, match="0 shares for a node of 1 ranks"):
        _C.ShardedHierarchical(alone, [], *arguments)
    with pytest.raises(ValueError, match=r"share 1 is of rank 0 of 1 .* needs an inner op"):
        _C.ShardedHierarchical(alone, [op, None], *arguments)
    first = _C.ThreadCommunicator(_C.ThreadHub(2, 20.0), 0)
    with pytest.raises(ValueError, match=r"share 1 is not of rank 0 of 2 .* takes no inner op"):
        _C.ShardedHierarchical(first, [op, op], *arguments)
