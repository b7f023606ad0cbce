"""Exact inside a node, another op between nodes, on thread ranks."""

import torch
from bagua import _C
from bagua._core.group.connections import by_node
from support.cases import over
from support.threads.op_ranks import (
    BAD_NUMEL,
    BAD_PLACES,
    BAD_VALUES,
    CODECS,
    COMPLEX,
    DTYPES,
    OPS,
    SIZES,
    assert_reduced,
    assert_same_bits,
    inputs,
    make_op,
    per_codec,
    per_op,
    run_op,
    step_of,
)

NODES = {
    "one-rank": [0],
    "one-node": [0, 0, 0],
    "two-nodes-of-two": [0, 0, 1, 1],
    "nodes-of-2-and-1": [0, 0, 1],
    "nodes-of-1-and-3": [0, 1, 1, 1],
    "nodes-of-3-1-and-3": [0, 0, 0, 1, 2, 2, 2],
    "interleaved-nodes": [0, 1, 0, 1, 0],
}


def run_sharded(nodes, kind, op, brought):
    """Share s is of member s mod n of each node of n ranks."""
    members = by_node(nodes)
    shares = max(map(len, members)) if len(members) > 1 else 0
    in_node = {node[0]: _C.ThreadHub(len(node), 20.0) for node in members}
    between_nodes = [_C.ThreadHub(len(members), 20.0) for _ in range(shares)]

    def make(comm):
        mine = next(node for node in members if comm.rank in node)
        node = _C.ThreadCommunicator(in_node[mine[0]], mine.index(comm.rank))
        inner = []
        for share, hub in enumerate(between_nodes):
            ranks = [node[share % len(node)] for node in members]
            if comm.rank in ranks:
                between = _C.ThreadCommunicator(hub, ranks.index(comm.rank))
                inner.append(make_op(between, kind, op))
            else:
                inner.append(None)
        return _C.ShardedHierarchical(node, inner, _C.Scratch(), len(nodes), len(members), OPS[op])

    return run_op(len(nodes), make, brought)


def through_leaders(nodes):
    """A function that makes a rank's op, given the op of the leaders."""
    leaders = [node[0] for node in by_node(nodes)]
    between_nodes = _C.ThreadHub(len(leaders), 20.0)
    in_node = {leader: _C.ThreadHub(nodes.count(nodes[leader]), 20.0) for leader in leaders}

    def make(comm, inner_of, ranks, reduction, codec=None, scratch=None, traffic=None):
        members = next(node for node in by_node(nodes) if comm.rank in node)
        node = _C.ThreadCommunicator(in_node[members[0]], members.index(comm.rank))
        inner = None
        if comm.rank in leaders:
            inner = inner_of(_C.ThreadCommunicator(between_nodes, leaders.index(comm.rank)))
        if traffic is not None:
            node = _C.CountingCommunicator(node)
            traffic.append((len(members), node))
        return _C.Hierarchical(node, inner, ranks, len(leaders), reduction, codec, scratch)

    return make


def run_hierarchical(nodes, kind, op, brought):
    through, n = through_leaders(nodes), len(nodes)

    def make(comm):
        return through(comm, lambda among: make_op(among, kind, op), n, OPS[op])

    return run_op(n, make, brought)


def run_with_payloads(nodes, kind, brought, traffic):
    """The result travels in a node as payloads, whose bytes are added to traffic."""
    through, n = through_leaders(nodes), len(nodes)

    def make(comm):
        codec, scratch = _C.make_codec(kind), _C.Scratch()

        def between(leaders):
            return _C.CompressedAllReduce(leaders, codec, scratch, OPS["mean"])

        return through(comm, between, n, OPS["mean"], codec, scratch, traffic)

    return run_op(n, make, brought)


WAYS = over(way=[run_hierarchical, run_sharded])


@WAYS
@per_op
@over(nodes=NODES.values(), dtype=[*DTYPES.values(), *COMPLEX])
def test_hierarchical_gives_the_mean_over_all_ranks_for_unequal_nodes(nodes, op, dtype, way):
    for numel in SIZES:
        brought = inputs(len(nodes), numel, dtype)
        results = way(nodes, "exact", op, brought)
        assert_same_bits(results)
        assert_reduced(results[0], brought, op)


@per_codec
@over(nodes=NODES.values(), dtype=DTYPES.values())
def test_payloads_of_a_result_give_all_ranks_of_a_node_the_bits_of_their_leader(
    nodes, codec, dtype
):
    for numel in SIZES:
        brought, nodes_traffic = inputs(len(nodes), numel, dtype), []
        plain = run_hierarchical(nodes, codec, "mean", brought)
        results = run_with_payloads(nodes, codec, brought, nodes_traffic)
        assert_same_bits([*plain, *results])


def test_payloads_of_a_result_are_all_that_a_leader_broadcasts():
    numel, traffic = 2**17, []
    brought = inputs(4, numel, torch.float32)
    run_with_payloads([0, 0, 1, 1], "block_uint8", brought, traffic)
    payloads = _C.make_codec("block_uint8").encode(brought[0]).numel()
    for size, node in traffic:
        of_sum = 2 * 4 * numel * (size - 1) // size
        assert 0 <= node.traffic()["bytes_sent"] - of_sum <= 1.01 * payloads


@WAYS
@per_codec
@over(nodes=NODES.values())
def test_hierarchical_compresses_between_nodes_only(nodes, codec, way):
    n, numel = len(nodes), 4096
    generator = torch.Generator().manual_seed(n)
    brought = [torch.rand(numel, generator=generator) * 2 - 1 for _ in range(n)]
    results = way(nodes, codec, "mean", brought)
    assert_same_bits(results)
    exact = torch.stack(brought).double().mean(0)
    error = (results[0] - exact).abs().max()
    one_node = len(set(nodes)) == 1
    # A leader's value is its node's mean times node_size * nodes / ranks, here at most 9/7 in size.
    assert error <= (1e-6 if one_node else 2 * step_of(codec))
    assert one_node or error > 0


@WAYS
@over(kind=["exact", *CODECS], bad=BAD_VALUES.values())
def test_a_bad_value_passes_through_hierarchical(kind, bad, way):
    for number, (place, index) in enumerate(BAD_PLACES.items()):
        brought = inputs(3, BAD_NUMEL, torch.float32)
        brought[number % 3][index] = bad
        results = way([0, 0, 1], kind, "mean", brought)
        assert_same_bits(results)
        assert not results[0][index].isfinite(), place
