"""Ops between up to 64 ranks, all threads: the oracle's bits, and costs that grow as documented."""

import pytest
import torch
from bagua import _C
from oracle import sparse
from oracle.compressed_all_reduce import compressed_all_reduce
from support.threads.low_rank_ranks import MATRICES, NUMEL, Rank
from support.threads.op_ranks import assert_same_bits, inputs, make_op, run_op
from support.threads.sparse_ranks import make, memory_of
from support.threads.thread_ranks import run_thread_ranks

MANY = 64


@pytest.mark.parametrize("codec", ["block_uint8", "int4_block"])
def test_compressed_means_of_many_ranks_have_the_bits_of_the_oracle(codec):
    brought = inputs(MANY, 14337, torch.float32)
    results = run_op(MANY, lambda comm: make_op(comm, codec), brought)
    assert_same_bits(results)
    assert torch.equal(results[0], compressed_all_reduce(codec, brought, average=True))


def test_sparse_means_of_many_ranks_have_the_bits_of_the_oracle():
    brought = inputs(MANY, 5003, torch.float32)

    def top_k(comm):
        return make(comm, "top-k", 5003, 20, memory_of(5003, torch.float32))

    results = run_op(MANY, top_k, brought)
    assert_same_bits(results)
    errors = [torch.zeros(5003)] * MANY
    assert torch.equal(results[0], sparse.top_k(brought, errors, 20)[0])


def dense(ranks, per_element, overhead=0):
    """A two-phase or ring all-reduce of `NUMEL` elements, as docs/algorithms.md counts it."""
    return 2 * (ranks - 1) * (per_element * NUMEL / ranks + overhead)


FACTORS = sum((rows + columns) * rank for _, rows, columns, rank in MATRICES)
VECTORS = NUMEL - sum(rows * columns for _, rows, columns, _ in MATRICES)
#: Name -> (op, messages per rank and other rank, bytes per rank).
KINDS = {
    "exact": (lambda comm: make_op(comm, "exact"), 2, lambda p: dense(p, 4)),
    # Each part has a frame, a range, and codes up to a multiple of 32.
    "block_uint8": (lambda comm: make_op(comm, "block_uint8"), 2, lambda p: dense(p, 1, 32 + 63)),
    "int4_block": (lambda comm: make_op(comm, "int4_block"), 2, lambda p: dense(p, 0.5, 32 + 95)),
    "largest": (
        lambda comm: make(comm, "top-k", NUMEL, 20, memory_of(NUMEL, torch.float32)),
        1,
        lambda p: (p - 1) * _C.sparse_message_bytes(NUMEL, 20, torch.float32),
    ),
    "low rank": (
        lambda comm: Rank(comm).op,
        4,
        lambda p: 2 * (p - 1) / p * 4 * (FACTORS + VECTORS),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_messages_and_bytes_of_a_rank_grow_as_documented(kind):
    """So does what it does for them: no op sends, or looks at, more than what arrives."""
    build, messages, most_bytes = KINDS[kind]
    for ranks in (2, 5, 16, MANY):
        brought = inputs(ranks, NUMEL, torch.float32)

        def counted(comm, brought=brought):
            counting = _C.CountingCommunicator(comm)
            op, flat = build(counting), brought[comm.rank].clone()
            op.run(flat, step=1)
            before = counting.traffic()
            op.run(flat, step=2)
            after = counting.traffic()
            return {key: after[key] - before[key] for key in after}

        for moved in run_thread_ranks(
            ranks, counted
        ):  # a rank beyond the last part of the bucket has none
            assert 0 < moved["messages_sent"] <= messages * (ranks - 1)
            for way in ("bytes_sent", "bytes_received"):
                assert 0 < moved[way] <= most_bytes(ranks) + 8
