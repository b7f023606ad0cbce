"""Ops on thread ranks: against their oracles, bit for bit between ranks, and with bad values."""

import pytest
import torch
from oracle.compressed_all_reduce import compressed_all_reduce, parts, payload_bytes

from bagua import _C
from single.thread_ranks import run_thread_ranks

RANKS = [1, 2, 3, 4, 7]
SIZES = [1, 31, 1000, 4096, 14337]
MORE_THAN_A_PIECE = 131072 + 2048 + 5  # of one rank's part
CODECS = ["minmax_uint8", "block_uint8", "fp16", "bf16"]
DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
}
OPS = {"sum": _C.ReduceOp.SUM, "mean": _C.ReduceOp.AVG}
FRAME_BYTES = 32

per_ranks = pytest.mark.parametrize("n", RANKS, ids=lambda n: f"{n}-ranks")
per_codec = pytest.mark.parametrize("codec", CODECS)
per_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
per_op = pytest.mark.parametrize("op", OPS)


def inputs(n, numel, dtype, salt=0):
    """One tensor per rank, of scales that differ along it as layers' gradients do."""
    generator = torch.Generator().manual_seed(1000 * n + numel + salt)
    scales = 10.0 ** torch.linspace(-3, 1, max(1, numel))
    return [(torch.randn(numel, generator=generator) * scales[:numel]).to(dtype) for _ in range(n)]


def compressed(comm, codec, op):
    return _C.CompressedAllReduce(comm, _C.make_codec(codec), _C.Scratch(), OPS[op])


def make_op(comm, kind, op="mean"):
    return _C.AllReduce(comm, OPS[op]) if kind == "exact" else compressed(comm, kind, op)


def run_op(n, make, brought):
    """The ranks' buckets after one run of `make(communicator)` on copies of `brought`."""

    def run(comm):
        flat = brought[comm.rank].clone()
        make(comm).run(flat)
        return flat

    return run_thread_ranks(n, run)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(results):
    for rank, result in enumerate(results):
        assert torch.equal(bits(result), bits(results[0])), f"rank {rank} differs from rank 0"


@per_dtype
@per_codec
@per_ranks
def test_compressed_all_reduce_gives_the_bits_of_its_oracle(n, codec, dtype):
    for numel in SIZES:
        for op in OPS:
            brought = inputs(n, numel, dtype)
            results = run_op(n, lambda comm, op=op: compressed(comm, codec, op), brought)
            assert_same_bits(results)
            expected = compressed_all_reduce(codec, brought, average=op == "mean")
            assert torch.equal(results[0], expected), f"{op} of {numel}"


@per_codec
@pytest.mark.parametrize("n", [2, 3], ids=lambda n: f"{n}-ranks")
def test_parts_of_several_pieces_give_the_bits_of_the_oracle(n, codec):
    numel = n * MORE_THAN_A_PIECE
    for missing in (0, 7):  # 7: the parts are of different sizes
        brought = inputs(n, numel - missing, torch.float32)
        results = run_op(n, lambda comm: compressed(comm, codec, "mean"), brought)
        assert_same_bits(results)
        assert torch.equal(results[0], compressed_all_reduce(codec, brought, average=True))


def test_compressed_all_reduce_gives_the_golden_vector_of_bagua():
    brought = [
        torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8]),
        torch.tensor([1.0, 0.9, 0.8, 0.7, -0.6, -0.5, -0.4, -0.3]),
    ]
    expected = torch.tensor(
        [
            0.549019933,
            0.349804133,
            0.549019933,
            0.149019688,
            -0.0494117774,
            -0.549019754,
            0.150980428,
            -0.549019754,
        ]
    )
    for result in run_op(2, lambda comm: compressed(comm, "minmax_uint8", "mean"), brought):
        assert torch.equal(result, expected)


@per_codec
def test_zeros_stay_zero(codec):
    brought = [torch.zeros(5000) for _ in range(3)]
    for result in run_op(3, lambda comm: compressed(comm, codec, "sum"), brought):
        assert torch.equal(bits(result), bits(brought[0]))


@per_op
@per_codec
def test_compression_errs_by_two_half_steps_at_most(codec, op):
    n, numel = 4, 20000
    generator = torch.Generator().manual_seed(3)
    brought = [torch.rand(numel, generator=generator) * 2 - 1 for _ in range(n)]
    exact = torch.stack(brought).double().sum(0) / (n if op == "mean" else 1)
    step = {"fp16": 2**-10, "bf16": 2**-7}.get(codec, 2 / 255)
    bound = 1.01 * step * (1 if op == "mean" else n)
    for result in run_op(n, lambda comm: compressed(comm, codec, op), brought):
        assert (result - exact).abs().max() <= bound


@per_dtype
@per_op
@per_ranks
def test_all_reduce_gives_the_sum_or_mean(n, op, dtype):
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-12}.get(dtype, 1e-5)
    for numel in [*SIZES, MORE_THAN_A_PIECE]:
        brought = inputs(n, numel, dtype)
        results = run_op(n, lambda comm: _C.AllReduce(comm, OPS[op]), brought)
        assert_same_bits(results)
        exact = torch.stack(brought).double().sum(0) / (n if op == "mean" else 1)
        scale = torch.stack(brought).double().abs().sum(0) / (n if op == "mean" else 1)
        assert ((results[0].double() - exact).abs() <= tolerance * scale).all()


@pytest.mark.parametrize("kind", ["exact", *CODECS])
def test_one_rank_alone_keeps_its_bits(kind):
    brought = inputs(1, 4099, torch.float32)
    (result,) = run_op(1, lambda comm: make_op(comm, kind), brought)
    assert torch.equal(bits(result), bits(brought[0]))


BAD_VALUES = {"nan": float("nan"), "plus-inf": float("inf"), "minus-inf": -float("inf")}
BAD_NUMEL = 3 * 5000  # three parts of two whole blocks and a shorter one
BAD_PLACES = {
    "first": 0,
    "end-of-block": 2047,
    "start-of-block": 2048,
    "start-of-last-partial-block": 4096,
    "end-of-part": 4999,
    "start-of-part": 5000,
    "in-the-last-partial-block": 14500,
    "last": BAD_NUMEL - 1,
}


@per_op
@pytest.mark.parametrize("bad", BAD_VALUES.values(), ids=BAD_VALUES)
@pytest.mark.parametrize("kind", ["exact", *CODECS])
def test_a_bad_value_reaches_every_rank(kind, bad, op):
    for place, index in BAD_PLACES.items():
        for culprit in range(3):
            brought = inputs(3, BAD_NUMEL, torch.float32)
            brought[culprit][index] = bad
            results = run_op(3, lambda comm: make_op(comm, kind, op), brought)
            assert_same_bits(results)
            assert not results[0][index].isfinite(), f"{place}, rank {culprit}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@per_codec
def test_a_bad_value_reaches_every_rank_in_other_dtypes(codec, dtype):
    for bad in BAD_VALUES.values():
        for place, index in BAD_PLACES.items():
            brought = inputs(3, BAD_NUMEL, dtype)
            brought[1][index] = bad
            results = run_op(3, lambda comm: compressed(comm, codec, "mean"), brought)
            assert_same_bits(results)
            assert not results[0][index].isfinite(), place


NODES = {
    "one-rank": [0],
    "one-node": [0, 0, 0],
    "two-nodes-of-two": [0, 0, 1, 1],
    "nodes-of-2-and-1": [0, 0, 1],
    "nodes-of-1-and-3": [0, 1, 1, 1],
    "nodes-of-3-1-and-3": [0, 0, 0, 1, 2, 2, 2],
    "interleaved-nodes": [0, 1, 0, 1, 0],
}


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


@per_dtype
@per_op
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_hierarchical_gives_the_mean_over_all_ranks_for_unequal_nodes(nodes, op, dtype):
    n = len(nodes)
    tolerance = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float64: 1e-12}.get(dtype, 1e-5)
    for numel in SIZES:
        brought = inputs(n, numel, dtype)
        results = [flat for flat, _ in run_hierarchical(nodes, "exact", op, brought)]
        assert_same_bits(results)
        stack = torch.stack(brought).double()
        divisor = n if op == "mean" else 1
        error = (results[0].double() - stack.sum(0) / divisor).abs()
        assert (error <= tolerance * stack.abs().sum(0) / divisor).all()


@per_codec
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_hierarchical_compresses_between_nodes_only(nodes, codec):
    n, numel = len(nodes), 4096
    generator = torch.Generator().manual_seed(n)
    brought = [torch.rand(numel, generator=generator) * 2 - 1 for _ in range(n)]
    results = [flat for flat, _ in run_hierarchical(nodes, codec, "mean", brought)]
    assert_same_bits(results)
    exact = torch.stack(brought).double().mean(0)
    error = (results[0] - exact).abs().max()
    one_node = len(set(nodes)) == 1
    # A leader's value is its node's mean times node_size * nodes / ranks, here at most 9/7 in size.
    step = {"fp16": 2**-10, "bf16": 2**-7}.get(codec, 2 / 255)
    assert error <= (1e-6 if one_node else 2 * step)
    assert one_node or error > 0


@pytest.mark.parametrize("bad", BAD_VALUES.values(), ids=BAD_VALUES)
@pytest.mark.parametrize("kind", ["exact", *CODECS])
def test_a_bad_value_passes_through_hierarchical(kind, bad):
    nodes = [0, 0, 1]
    for culprit in range(3):
        for place, index in BAD_PLACES.items():
            brought = inputs(3, BAD_NUMEL, torch.float32)
            brought[culprit][index] = bad
            results = [flat for flat, _ in run_hierarchical(nodes, kind, "mean", brought)]
            assert_same_bits(results)
            assert not results[0][index].isfinite(), f"{place}, rank {culprit}"


@pytest.mark.parametrize("numel", [4096, 4099, 14337], ids=lambda numel: f"{numel}-elements")
@per_codec
@per_ranks
def test_compressed_all_reduce_sends_payloads_and_frames_and_nothing_else(n, codec, numel):
    def run(comm):
        counting = _C.CountingCommunicator(comm)
        compressed(counting, codec, "mean").run(torch.zeros(numel))
        return counting.traffic()

    sizes = [
        payload_bytes(codec, torch.float32, part) if part else 0 for _, part in parts(numel, n)
    ]
    for rank, traffic in enumerate(run_thread_ranks(n, run)):
        scattered = sum(FRAME_BYTES + size for peer, size in enumerate(sizes) if peer != rank)
        gathered = (n - 1) * (FRAME_BYTES + sizes[rank])
        assert traffic["bytes_sent"] == scattered + gathered
        assert traffic["messages_sent"] == 2 * (n - 1)
        assert traffic["bytes_received"] == scattered + gathered


def garbage(comm, numel, first_word):
    """What a rank with another library version might send: the right sizes, other bytes."""
    message = torch.zeros(FRAME_BYTES + payload_bytes("block_uint8", torch.float32, numel // 2))
    message = message.to(torch.uint8)
    message[:8] = torch.frombuffer(bytearray(first_word), dtype=torch.uint8)
    incoming = torch.empty_like(message)
    comm.exchange([(message, 0)], [(incoming, 0)])
    comm.exchange([(message, 0)], [(incoming, 0)])


@pytest.mark.parametrize("first_word", [b"\0" * 8, b"BGframe1"], ids=["no-frame", "other-plan"])
def test_a_payload_that_does_not_match_names_bucket_and_peer(first_word):
    caught = []

    def run(comm):
        if comm.rank == 1:
            try:
                garbage(comm, 4096, first_word)
            except _C.BaguaError:
                return  # rank 0 is gone by the second message
        try:
            compressed(comm, "block_uint8", "mean").run(torch.ones(4096), bucket="the bucket")
        except _C.BaguaMismatchError as error:
            caught.append(str(error))
            comm.abort(str(error))

    run_thread_ranks(2, run)
    assert len(caught) == 1
    assert "bucket 'the bucket': the payload from rank 1 does not match" in caught[0]


def frames_differ(mine, theirs):
    """The error of rank 0 when two ranks run slightly different all-reduces of equal size."""
    errors = [None, None]

    def run(comm):
        codec, step, bucket = (mine, theirs)[comm.rank]
        try:
            op = compressed(comm, codec, "mean")
            op.run(torch.ones(64), step=step, bucket=bucket)
        except _C.BaguaMismatchError as error:
            errors[comm.rank] = str(error)

    run_thread_ranks(2, run)
    return errors


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (("bf16", 1, "b"), "fingerprint of codec, dtype and sizes"),
        (("fp16", 2, "b"), "round is 2, expected 1"),
        (("fp16", 1, "c"), "fingerprint of codec, dtype and sizes"),
    ],
    ids=["codec", "round", "bucket"],
)
def test_equal_sizes_do_not_hide_a_difference_between_ranks(theirs, words):
    first, second = frames_differ(("fp16", 1, "b"), theirs)
    assert words in first
    assert "rank 0 does not match" in second


def test_integers_and_wrong_reductions_are_refused():
    comm = _C.ThreadCommunicator(_C.ThreadHub(2, 1.0), 0)
    with pytest.raises(_C.BaguaError, match=r"takes float32.*not Int.*to_ignore"):
        compressed(comm, "block_uint8", "mean").run(torch.zeros(4, dtype=torch.int32))
    for make in (
        lambda: _C.AllReduce(comm, _C.ReduceOp.MAX),
        lambda: _C.CompressedAllReduce(comm, _C.make_codec("fp16"), _C.Scratch(), _C.ReduceOp.MIN),
    ):
        with pytest.raises(ValueError, match=r"takes ReduceOp.SUM or ReduceOp.AVG"):
            make()
    with pytest.raises(ValueError, match=r"leader of a node needs the inner op"):
        _C.Hierarchical(comm, None, 4, 2, _C.ReduceOp.AVG)


@pytest.mark.parametrize("kind", ["exact", *CODECS])
def test_an_op_describes_itself(kind):
    (text,) = run_thread_ranks(1, lambda comm: make_op(comm, kind, "sum").describe())
    assert text == (
        "AllReduce(sum, ranks 1)"
        if kind == "exact"
        else f"CompressedAllReduce({kind}, sum, ranks 1)"
    )
