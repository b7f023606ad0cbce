"""The ops that a guard puts around others: samples, exact rounds, residuals that are sent."""

import pytest
import torch
from bagua import _C
from bagua._core.compression.error_state import new_memory
from bagua._core.compression.low_rank import low_rank_matrices, low_rank_memory
from bagua._core.compression.two_residuals import TwoResiduals
from oracle import compressed_all_reduce as oracle
from support.threads.thread_ranks import run_thread_ranks

RANKS = [1, 2, 3, 4]
NUMEL = 96


def values(rank, round_, numel=NUMEL):
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * round_ + rank))


def mean(ranks, round_, numel=NUMEL):
    return torch.stack([values(rank, round_, numel) for rank in range(ranks)]).mean(0)


def sparse_of(comm, memory):
    return _C.Sparse(comm, _C.Scratch(), NUMEL, 3, memory)


def exact_of(comm):
    return _C.AllReduce(comm, _C.ReduceOp.AVG)


def new_sparse_memory(outcome):
    count = torch.zeros(1, dtype=torch.int64)
    return new_memory(torch.zeros(NUMEL), outcome, count, error_feedback=True)


@pytest.mark.parametrize("size", RANKS)
def test_a_sample_has_elements_from_before_and_after_the_op_once(size):
    places = torch.tensor([0, 5, 5, NUMEL - 1])

    def rank(comm):
        op = _C.Sampled(exact_of(comm))
        flat = values(comm.rank, 0)
        op.run(flat)
        assert op.take() is None
        op.request(places)
        assert op.take() is None
        flat = values(comm.rank, 1)
        op.run(flat, step=2, grad_scale=8.0)
        before, after, scale = op.take()
        assert torch.equal(before, values(comm.rank, 1)[places])
        assert torch.equal(after, flat[places])
        assert scale == 8.0
        op.run(flat, step=3)
        assert op.take() is None, "one round per request"

    run_thread_ranks(size, rank)


@pytest.mark.parametrize("size", RANKS)
def test_a_fallback_runs_the_exact_op_in_the_rounds_that_ask_for_it(size):
    def rank(comm):
        usual = _C.Sparse(comm, _C.Scratch(), NUMEL, 1, new_sparse_memory(_C.RoundOutcome()))
        op = _C.Fallback(usual, exact_of(comm))
        assert op.describe() == usual.describe()
        for round_, exact in enumerate([True, True, False]):
            op.use_other(exact)
            flat = values(comm.rank, round_)
            op.run(flat, step=round_ + 1)
            assert (int(flat.count_nonzero()) > size) == exact
            if exact:
                torch.testing.assert_close(flat, mean(size, round_))

    run_thread_ranks(size, rank)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_an_exact_round_sends_residuals_so_that_nothing_is_lost(size, scale):
    """The sums of the results and of the exact means over all rounds are equal."""

    def rank(comm):
        memory = new_sparse_memory(_C.RoundOutcome())
        op = _C.Fallback(sparse_of(comm, memory), _C.SettleResiduals(exact_of(comm), memory))
        total = torch.zeros(NUMEL)
        for round_, exact in enumerate([False, False, False, True]):
            op.use_other(exact)
            flat = values(comm.rank, round_) * scale
            op.run(flat, step=round_ + 1, grad_scale=scale)
            total += flat / scale
        assert memory.value(0).count_nonzero() == 0
        expected = sum(mean(size, round_) for round_ in range(4))
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)

    run_thread_ranks(size, rank)


@pytest.mark.parametrize("size", [2, 3])
def test_both_residuals_of_a_compressed_mean_are_sent(size):
    def rank(comm):
        two = TwoResiduals.zero(
            torch.zeros(NUMEL), 0, _C.RoundOutcome(), list(range(size)), comm.rank
        )
        codec = _C.make_codec("bit2_block")
        usual = _C.CompressedAllReduce(
            comm, codec, _C.Scratch(), _C.ReduceOp.AVG, memory=two.memory
        )
        settled = _C.SettleResiduals(exact_of(comm), two.memory, (2, two.first, size))
        op = _C.Fallback(usual, settled)
        total = torch.zeros(NUMEL)
        for round_, exact in enumerate([False, False, True, False, True]):
            op.use_other(exact)
            flat = values(comm.rank, round_)
            op.run(flat, step=round_ + 1)
            total += flat
        assert all(two.memory.value(i).count_nonzero() == 0 for i in (0, 2))
        expected = sum(mean(size, round_) for round_ in range(5))
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)

    run_thread_ranks(size, rank)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("codec", ["int4_block", "bit2_block", "bit1_block"])
def test_two_codecs_share_residuals_and_exact_rounds_send_what_both_have_left(size, scale, codec):
    """Sums of results and of exact means are equal after an exact round; the oracle has the bits of
    the others."""
    rounds = [codec, codec, "block_uint8", "block_uint8", codec, "block_uint8", "exact", codec]

    def rank(comm):
        two = TwoResiduals.zero(
            torch.zeros(NUMEL), 0, _C.RoundOutcome(), list(range(size)), comm.rank
        )
        usual, eight_bits = (
            _C.CompressedAllReduce(
                comm, _C.make_codec(name), _C.Scratch(), _C.ReduceOp.AVG, memory=two.memory
            )
            for name in (codec, "block_uint8")
        )
        settled = _C.SettleResiduals(exact_of(comm), two.memory, (2, two.first, size))
        inner = _C.Fallback(usual, eight_bits)
        op = _C.Fallback(inner, settled)
        assert op.describe() == usual.describe()
        errors = [torch.zeros(NUMEL) for _ in range(size)]
        servers = [torch.zeros(numel) for _, numel in oracle.parts(NUMEL, size)]
        total, expected = torch.zeros(NUMEL), torch.zeros(NUMEL)
        for round_, name in enumerate(rounds):
            op.use_other(name == "exact")
            inner.use_other(name == "block_uint8")
            flat = values(comm.rank, round_) * scale
            op.run(flat, step=round_ + 1, grad_scale=scale)
            total += flat / scale
            expected += mean(size, round_)
            if name == "exact":
                torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
                errors = [torch.zeros(NUMEL) for _ in range(size)]
                servers = [torch.zeros_like(server) for server in servers]
                continue
            inputs = [values(r, round_) * scale for r in range(size)]
            result, errors, servers = oracle.with_residuals(name, inputs, errors, servers, scale)
            assert torch.equal(flat, result), round_
            assert torch.equal(two.memory.value(0), errors[comm.rank])
            assert torch.equal(two.memory.value(2), servers[comm.rank])
        assert int(two.memory.value(1)) == len(rounds) - 1, "rounds that were compressed"

    run_thread_ranks(size, rank)


def test_queries_and_counters_stay_in_exact_rounds():
    def rank(comm):
        flat = values(comm.rank, 0).reshape(12, 8)
        matrices = low_rank_matrices([("w", flat)], 1, 1.0)
        memory = low_rank_memory(flat.reshape(-1), matrices, _C.RoundOutcome(), error_feedback=True)
        low_rank = _C.LowRank(
            comm,
            _C.Scratch(),
            NUMEL,
            list(matrices.values()),
            warm_start=True,
            error_feedback=True,
            seed=0,
            memory=memory,
        )
        op = _C.Fallback(low_rank, _C.SettleResiduals(exact_of(comm), memory))
        op.run(flat.reshape(-1), step=1)
        queries, count = memory.value(1).clone(), int(memory.value(2))
        assert queries.any()
        op.use_other(True)
        op.run(values(comm.rank, 1), step=2)
        assert torch.equal(memory.value(1), queries)
        assert int(memory.value(2)) == count
        assert not memory.value(0).any()

    run_thread_ranks(2, rank)


def test_a_round_that_is_not_finite_leaves_residuals_as_they_were():
    def rank(comm):
        memory = new_sparse_memory(_C.RoundOutcome())
        op = _C.Fallback(sparse_of(comm, memory), _C.SettleResiduals(exact_of(comm), memory))
        op.run(values(comm.rank, 0), step=1)
        residual = memory.value(0).clone()
        assert residual.any()
        op.use_other(True)
        flat = values(comm.rank, 1)
        flat[7] = float("nan")
        op.run(flat, step=2)
        assert torch.equal(memory.value(0), residual)

    run_thread_ranks(2, rank)


@pytest.mark.parametrize("size", [2, 3])
def test_the_mean_of_weights_becomes_the_replicas_where_it_is_finite(size):
    sizes = [1, 2, 3][:size]

    def rank(comm):
        replicas = [torch.full((NUMEL,), 7.0) for _ in range(3)]
        share = sizes[comm.rank] * size / sum(sizes)
        flat = values(comm.rank, 0)
        flat[3] = float("inf") if comm.rank == 0 else 1.0
        _C.MeanOfWeights(comm, share, replicas).run(flat)
        weighted = torch.stack([values(r, 0) * sizes[r] for r in range(size)]).sum(0) / sum(sizes)
        others = torch.arange(NUMEL) != 3
        torch.testing.assert_close(flat[others], weighted[others])
        assert not flat[3].isfinite()
        for replica in replicas:
            assert torch.equal(replica[others], flat[others])
            assert replica[3] == 7.0

    run_thread_ranks(size, rank)
