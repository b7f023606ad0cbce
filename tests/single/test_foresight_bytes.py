"""Bytes that the cost model predicts, against those that the operations send between threads."""

import pytest
import torch
from bagua import _C
from bagua._foresight.candidate import Candidate
from bagua._foresight.cost import predict
from bagua._foresight.profile import BucketProfile, Link, Profile
from support.threads.low_rank_ranks import Rank
from support.threads.op_ranks import inputs, make_op
from support.threads.sparse_ranks import make as make_sparse
from support.threads.sparse_ranks import memory_of
from support.threads.thread_ranks import run_thread_ranks

NUMEL = 3 * 65536 + 1000  # parts of several ranks end within a tile and behind one
SHAPES = ((256, 512), (100, 600), (5608, 1))
FLAT = {"hierarchical": False}
LINK = Link(1e-5, 1e9)


def padded(numel, ranks):
    return numel + -numel % (16 * ranks)


def exact(comm, numel):
    return _C.AllReduce(comm, _C.ReduceOp.SUM)


def compressed(codec):
    def make(comm, numel):
        return _C.CompressedAllReduce(comm, _C.make_codec(codec), _C.Scratch(), _C.ReduceOp.AVG)

    return make


def gossip(codec):
    def make(comm, numel):
        replicas = [torch.zeros(numel) for _ in range(3)]
        return _C.CompressedGossip(
            comm, _C.make_codec(codec), _C.Scratch(), *replicas, mix_left=1 / 3, mix_right=1 / 3
        )

    return make


def sparse(kind, codec=None):
    def make(comm, numel):
        k = round(0.01 * numel)
        return make_sparse(comm, kind, numel, k, memory_of(numel, torch.float32), codec=codec)

    return make


def chunked(comm, numel):
    memory = _C.RoundMemory(
        [torch.zeros(numel), torch.zeros(1, dtype=torch.int64)], _C.RoundOutcome()
    )
    return _C.ChunkedSparse(comm, _C.Scratch(), k=64, decay=0.95, numel=numel, memory=memory)


def low_rank(comm, numel):
    matrices = [(0, 256, 512, 2), (256 * 512, 100, 600, 2)]
    return Rank(comm, numel, matrices).op


#: (candidate, op of one bucket, whether buckets are padded)
KINDS = {
    "exact": (Candidate("gradient_allreduce"), exact, False),
    "8 bits": (Candidate("bytegrad", FLAT), compressed("block_uint8"), True),
    "8 bits, one range": (
        Candidate("bytegrad", {**FLAT, "codec": "minmax_uint8"}),
        compressed("minmax_uint8"),
        True,
    ),
    "4 bits": (
        Candidate("bytegrad", {**FLAT, "codec": "int4_block"}),
        compressed("int4_block"),
        True,
    ),
    "low rank": (Candidate("power_sgd", {"rank": 2}), low_rank, False),
    "sparse": (Candidate("sparse"), sparse("top-k"), False),
    "sparse, 4 bits": (
        Candidate("sparse", {"codec": "int4_block"}),
        sparse("top-k", "int4_block"),
        False,
    ),
    "random": (Candidate("sparse", {"random_sparse": True}), sparse("random"), False),
    "differences": (
        Candidate("low_precision_decentralized", FLAT),
        gossip("block_uint8"),
        False,
    ),
    "chunks": (Candidate("sparse_loco", {"interval": 1}), chunked, False),
}


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_predicted_bytes_are_those_that_are_sent(kind, ranks):
    candidate, build, pads = KINDS[kind]
    profile = Profile(
        ranks=ranks,
        nodes=(1,) * ranks,
        compute=1.0,
        optimizer=0.0,
        buckets=(BucketProfile(NUMEL, 4 * NUMEL, 1.0, SHAPES),),
        between=LINK,
    )
    numel = padded(NUMEL, ranks) if pads else NUMEL
    brought = inputs(ranks, numel, torch.float32)

    def counted(comm):
        counting = _C.CountingCommunicator(comm)
        build(counting, numel).run(brought[comm.rank].clone(), step=1)
        return counting.traffic()["bytes_sent"]

    sent = run_thread_ranks(ranks, counted)
    assert predict(profile, candidate).bytes_sent == max(sent)


def counted_in_nodes(nodes, size, way, kind):
    """Bytes that each rank sends in ``nodes`` nodes of ``size`` ranks, inside and between them."""
    ranks = nodes * size
    numel = 16 * 3 * ranks * 64
    inside = [_C.ThreadHub(size, 20.0) for _ in range(nodes)]
    between = [_C.ThreadHub(nodes, 20.0) for _ in range(size)]
    brought = inputs(ranks, numel, torch.float32)

    def run(comm):
        node, place = divmod(comm.rank, size)
        own = _C.CountingCommunicator(_C.ThreadCommunicator(inside[node], place))
        inner, leaders = [None] * size, None
        if way == "sharded" or place == 0:
            leaders = _C.CountingCommunicator(_C.ThreadCommunicator(between[place], node))
            inner[place] = make_op(leaders, kind)
        if way == "sharded":
            op = _C.ShardedHierarchical(own, inner, _C.Scratch(), ranks, nodes, _C.ReduceOp.AVG)
        else:
            op = _C.Hierarchical(own, inner[0], ranks, nodes, _C.ReduceOp.AVG)
        op.run(brought[comm.rank].clone())
        return sum(c.traffic()["bytes_sent"] for c in (own, leaders) if c is not None)

    return numel, max(run_thread_ranks(ranks, run))


@pytest.mark.parametrize("kind", ["exact", "block_uint8"])
@pytest.mark.parametrize(
    ("way", "nodes", "size"),
    [(True, 1, 3), (True, 3, 2), (True, 2, 4), ("sharded", 3, 2), ("sharded", 2, 4)],
)
def test_predicted_bytes_of_nodes_are_those_that_a_leader_sends(way, nodes, size, kind):
    numel, sent = counted_in_nodes(nodes, size, way, kind)
    profile = Profile(
        ranks=nodes * size,
        nodes=(size,) * nodes,
        compute=1.0,
        optimizer=0.0,
        buckets=(BucketProfile(numel, 4 * numel, 1.0),),
        between=LINK,
    )
    name = "gradient_allreduce" if kind == "exact" else "bytegrad"
    found = predict(profile, Candidate(name, {"hierarchical": way}))
    assert found.bytes_sent == pytest.approx(sent, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_predicted_bytes_of_gossip_are_the_mean_over_the_ranks(ranks):
    rounds = ranks  # in which each rank of an odd number has once had no peer
    brought = inputs(ranks, 1000, torch.float32)

    def counted(comm):
        counting = _C.CountingCommunicator(comm)
        communications = torch.zeros((), dtype=torch.int64)
        op = _C.Gossip(counting, communications, [1] * ranks, _C.Scratch())
        flat = brought[comm.rank].clone()
        for _ in range(rounds):
            op.run(flat)
            communications += 1
        return counting.traffic()["bytes_sent"]

    sent = run_thread_ranks(ranks, counted)
    profile = Profile(
        ranks=ranks,
        nodes=(1,) * ranks,
        compute=1.0,
        optimizer=0.0,
        buckets=(BucketProfile(1000, 4000, 1.0),),
        between=LINK,
    )
    candidate = Candidate("decentralized", {**FLAT, "peer_selection_mode": "shift_one"})
    assert predict(profile, candidate).bytes_sent == sum(sent) // (ranks * rounds)
