"""What an op says of itself, and the messages and bytes that up to 64 ranks send."""

import pytest
import torch
from bagua import _C
from mlbench_core.aggregation.pytorch.decentralized import metropolis_weights
from oracle.codec import payload_bytes
from oracle.compressed_all_reduce import parts
from single.test_all_reduce_rows import ROWS, WIDTH, gradient
from single.test_compressed_gossip import make_op as make_gossip
from single.test_sharded_ops import gathering, memory, scattering
from single.test_two_residuals import memory_of as memory_of_parts, op_of as with_residuals
from support import graphs
from support.threads.low_rank_ranks import MATRICES, NUMEL, Rank
from support.threads.op_ranks import CODECS, OPS, compressed
from support.threads.sparse_ranks import make as make_sparse, memory_of
from support.threads.thread_ranks import run_thread_ranks

RANKS = [1, 2, 3, 4, 7, 64]
PART = 611  # elements of each rank's part of a bucket
FRAME_BYTES = 32
K = 20


def rows(comm):
    """The largest gradient, of the last rank, has 4 rows."""
    holder = _C.SparseGradient()
    holder.local = gradient([0, 5, 6, 7]) if comm.rank == comm.size - 1 else gradient([1, 1, 2])
    return _C.AllReduceRows(comm, _C.Scratch(), holder, [ROWS, WIDTH], OPS["mean"])


def averaged_weights(comm):
    communications = torch.tensor(0)
    gossip = _C.Gossip(comm, communications, [1] * comm.size, _C.Scratch())
    return _C.AverageWeights(torch.zeros(comm.size * PART), communications, gossip)


def neighbours(comm):
    weights = metropolis_weights(comm.rank, graphs.ring(comm.size))
    return _C.NeighborAverage(comm, *weights, _C.Scratch())


def feeding_back(kind, comm):
    return make_sparse(comm, kind, comm.size * PART, K, memory_of(comm.size * PART, torch.float32))


def sparse_forgets(comm):
    numel = comm.size * PART
    forgets = memory_of(numel, torch.float32, remembers=False)
    return _C.Sparse(comm, _C.Scratch(), numel, K, forgets, checksum=True)


def message(codec, numel):
    return FRAME_BYTES + (payload_bytes(codec, torch.float32, numel) if numel else 0)


# All ranks' messages and bytes.


def two_phases(codec, n):
    return 2 * n * (n - 1), 2 * (n - 1) * sum(
        message(codec, size) for _, size in parts(n * PART, n)
    )


def exact(n):
    return 2 * n * (n - 1), 2 * (n - 1) * 4 * n * PART


def to_all(message_bytes, n):
    return n * (n - 1), n * (n - 1) * message_bytes


def remembering_scatter(n):
    """All ranks agree in one number on whether the round was finite."""
    messages, sent = to_all(message("fp16", PART), n)
    return messages + 2 * n * (n - 1), sent + n * (2 * 4 * (n - 1) // n)


def to_neighbours(message_bytes, n):
    messages = {1: 0, 2: 2}.get(n, 2 * n)
    return messages, messages * message_bytes


def of_low_rank(n):
    left = sum(rows * rank for _, rows, _, rank in MATRICES)
    vectors = NUMEL - sum(rows * columns for _, rows, columns, _ in MATRICES)
    right = sum(columns * rank for _, _, columns, rank in MATRICES)
    sizes = [4 * (left + vectors), 4 * right]
    return 4 * n * (n - 1), sum(n * (2 * size * (n - 1) // n) for size in sizes)


#: (op on a communicator, what it says of itself, messages and bytes of n ranks)
KINDS = [
    (lambda c: _C.AllReduce(c, OPS["mean"]), "AllReduce(mean, ranks {n})", exact),
    (
        lambda c: feeding_back("exact", c),
        "ErrorFeedbackAllReduce(mean, ranks {n})",
        exact,
    ),
    (
        rows,
        f"AllReduceRows(mean, {ROWS} rows of {WIDTH}, ranks {{n}})",
        lambda n: (2 * n * (n - 1), n * (n - 1) * (8 + 4 * 8 + 4 * WIDTH * 4)),
    ),
    *[
        (
            lambda c, codec=codec: compressed(c, codec, "sum"),
            f"CompressedAllReduce({codec}, sum, ranks {{n}})",
            lambda n, codec=codec: two_phases(codec, n),
        )
        for codec in CODECS
    ],
    (
        lambda c: with_residuals(c, "fp16", memory_of_parts(c.size * PART, c.rank, c.size)),
        "CompressedAllReduce(fp16, mean, ranks {n}, error feedback)",
        lambda n: two_phases("fp16", n),
    ),
    (
        lambda c: scattering(c, "fp16", 3.0, checksum=True),
        "CompressedReduceScatter(fp16, divided by 3, ranks {n}, checksum)",
        lambda n: to_all(message("fp16", PART), n),
    ),
    (
        lambda c: scattering(c, "fp16", memory=memory(c.size * PART, _C.RoundOutcome())),
        "CompressedReduceScatter(fp16, divided by 1, ranks {n}, error feedback)",
        remembering_scatter,
    ),
    (
        lambda c: gathering(c, "fp16"),
        "CompressedAllGather(fp16, ranks {n})",
        lambda n: to_all(message("fp16", PART), n),
    ),
    (
        lambda c: make_gossip(c, "block_uint8", torch.zeros(c.size * PART))[0],
        "CompressedGossip(block_uint8, ring of {n})",
        lambda n: to_neighbours(message("block_uint8", n * PART), n),
    ),
    (
        averaged_weights,
        "AverageWeights(Gossip(shift_one, ranks {n}))",
        lambda n: (n - n % 2, (n - n % 2) * 4 * n * PART),
    ),
    (
        lambda c: _C.UpdateMomentum(
            [torch.zeros(c.size * PART)],
            *([0], [[1]], torch.tensor([0.9], dtype=torch.float64), _C.Scratch()),
        ),
        "UpdateMomentum(1 slots)",
        lambda n: (0, 0),
    ),
    (
        neighbours,
        "NeighborAverage(neighbours {k}, ranks {n})",
        lambda n: to_neighbours(4 * n * PART, n),
    ),
    (
        lambda c: feeding_back("top-k", c),
        "Sparse(20 of {numel}, ranks {n})",
        lambda n: to_all(_C.sparse_message_bytes(n * PART, K, torch.float32), n),
    ),
    (
        sparse_forgets,
        "Sparse(20 of {numel}, ranks {n}, no error feedback, checksum)",
        lambda n: to_all(_C.sparse_message_bytes(n * PART, K, torch.float32), n),
    ),
    (lambda c: Rank(c).op, "LowRank(4 matrices, 173 + 327 elements sent)", of_low_rank),
]


@pytest.mark.parametrize(("make", "text", "sent"), KINDS, ids=[kind[1] for kind in KINDS])
def test_an_op_says_what_it_is_and_sends_the_documented_bytes(make, text, sent):
    for n in RANKS:
        numel = {"LowRank": NUMEL, "AllReduceRows": 1}.get(text.split("(")[0], n * PART)

        def run(comm, numel=numel):
            counting = _C.CountingCommunicator(comm)
            op = make(counting)
            op.run(torch.zeros(numel))
            return op.describe(), counting.traffic()

        said, traffic = zip(*run_thread_ranks(n, run), strict=True)
        said_of_all = text.format(n=n, numel=numel, k={1: 0, 2: 1}.get(n, 2))
        assert set(said) == {said_of_all}
        for way in ("sent", "received"):
            found = [sum(t[f"{what}_{way}"] for t in traffic) for what in ("messages", "bytes")]
            assert found == list(sent(n)), f"{way} by {n} ranks"


def test_a_sparse_message_is_a_frame_values_and_packed_indices():
    assert _C.sparse_message_bytes(10000, 100, torch.float32) == 32 + 416 + 192  # of 14 bits each
