"""64 thread ranks train with every operation: as the oracle where ranks stay equal, towards each
other where they do not.

Rank r minimises |x - t_r|² / 2, so that its gradient is x - t_r and all together want the mean t.
"""

import pytest
import torch
from bagua import _C
from oracle import decentralized, sparse
from oracle.compressed_all_reduce import compressed_all_reduce, parts, with_residuals
from oracle.low_precision_decentralized import Ring
from support.threads.low_rank_ranks import Rank
from support.threads.op_ranks import assert_same_bits, make_op
from support.threads.sparse_ranks import make as make_sparse
from support.threads.sparse_ranks import memory_of
from support.threads.thread_ranks import run_thread_ranks

MANY = 64
NUMEL = 1024
ROWS = 32
STEPS = 5
LR = 0.5
K = 50


def targets():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(NUMEL, generator=generator) for _ in range(MANY)]


def trained(make, steps=STEPS):
    """By rank: the weights after each step with the averaged gradient. `make(comm)`: the op."""
    wanted = targets()

    def train(comm):
        op, x, seen = make(comm), torch.zeros(NUMEL), []
        for step in range(steps):
            gradient = x - wanted[comm.rank]
            op.run(gradient, step=step + 1)
            x = x - LR * gradient
            seen.append(x)
        return seen

    return run_thread_ranks(MANY, train)


def expected(mean, steps):
    """The weights after each step, where `mean(gradients)` is what all ranks get."""
    wanted, x, seen = targets(), torch.zeros(NUMEL), []
    for _ in range(steps):
        x = x - LR * mean([x - target for target in wanted])
        seen.append(x)
    return seen


def error_feedback(comm):
    own = parts(NUMEL, MANY)[comm.rank][1]
    residuals = [torch.zeros(NUMEL), torch.zeros(1, dtype=torch.int64), torch.zeros(own)]
    memory = _C.RoundMemory(residuals, _C.RoundOutcome())
    codec = _C.make_codec("bit2_block")
    return _C.CompressedAllReduce(comm, codec, _C.Scratch(), _C.ReduceOp.AVG, memory=memory)


class Remembered:
    """An oracle that has residuals of all ranks."""

    def __init__(self, step, *memory):
        self.step, self.memory = step, memory

    def __call__(self, gradients):
        result, *self.memory = self.step(gradients, *self.memory)
        return result


def zeros(sizes):
    return [torch.zeros(size) for size in sizes]


EVERYONE = [NUMEL] * MANY
#: Name -> (op, oracle of all ranks' gradients)
EQUAL = {
    "8 bits": (
        lambda comm: make_op(comm, "block_uint8"),
        lambda: lambda gradients: compressed_all_reduce("block_uint8", gradients, average=True),
    ),
    "2 bits, error feedback": (
        error_feedback,
        lambda: Remembered(
            lambda gradients, errors, servers: with_residuals(
                "bit2_block", gradients, errors, servers
            ),
            zeros(EVERYONE),
            zeros([size for _, size in parts(NUMEL, MANY)]),
        ),
    ),
    "largest": (
        lambda comm: make_sparse(comm, "top-k", NUMEL, K, memory_of(NUMEL, torch.float32)),
        lambda: Remembered(
            lambda gradients, errors: sparse.top_k(gradients, errors, K), zeros(EVERYONE)
        ),
    ),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_many_ranks_train_as_the_oracle(kind):
    make, oracle = EQUAL[kind]
    steps = 2 if "bits" in kind else STEPS  # the oracle encodes every part of every rank
    of_ranks, wanted = trained(make, steps), expected(oracle(), steps)
    for step in range(steps):
        assert_same_bits([seen[step] for seen in of_ranks])
        assert (of_ranks[0][step] - wanted[step]).abs().max() <= 1e-6 * wanted[step].abs().max()


@pytest.mark.parametrize("kind", ["exact", "low rank"])
def test_many_ranks_with_equal_gradients_reach_the_mean_that_all_want(kind):
    def low_rank(comm):
        return Rank(comm, NUMEL, [(0, ROWS, NUMEL // ROWS, 4)]).op

    make = low_rank if kind == "low rank" else lambda comm: make_op(comm, "exact")
    of_ranks = trained(make)
    mean = sum(targets()) / MANY
    for step in range(STEPS):
        assert_same_bits([seen[step] for seen in of_ranks])
    distance = [float((seen - mean).norm()) for seen in of_ranks[0]]
    assert distance[-1] < distance[0]
    if kind == "exact":
        assert distance[-1] <= LR ** (STEPS - 1) * distance[0] * 1.01


def test_many_ranks_gossip_as_the_oracle_and_meet():
    start = targets()

    def gossip(comm):
        flat, communications = start[comm.rank].clone(), torch.zeros((), dtype=torch.int64)
        op = _C.Gossip(comm, communications, [1] * MANY, _C.Scratch())
        for round in range(STEPS):
            op.run(flat, step=round + 1)
            communications += 1
        return flat

    found = run_thread_ranks(MANY, gossip)
    wanted = [[one.double()] for one in start]
    for round in range(STEPS):
        wanted = decentralized.average(wanted, "shift_one", round)
    for own, (oracle,) in zip(found, wanted, strict=True):
        assert (own - oracle).abs().max() <= 1e-6
    mean = sum(start) / MANY
    before, after = (sum((one - mean).square().sum() for one in ranks) for ranks in (start, found))
    assert (
        after < before / 8
    )  # random halving would give 2^-5; the schedule is as good but for ties


def test_many_ranks_on_a_ring_have_the_oracles_bits_and_the_mean_that_they_began_with():
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    added = targets()

    def mix(comm):
        replicas = [start.clone() for _ in range(3)]
        codec = _C.make_codec("block_uint8")
        op = _C.CompressedGossip(comm, codec, _C.Scratch(), *replicas, 1 / 3, 1 / 3)
        flat = start + added[comm.rank]
        for round in range(STEPS):
            op.run(flat, step=round + 1)
        return flat

    found = run_thread_ranks(MANY, mix)
    ring = Ring(start, "block_uint8", [1] * MANY)
    wanted = [start + own for own in added]
    for _ in range(STEPS):
        wanted = ring.mix(wanted)
    for own, oracle in zip(found, wanted, strict=True):
        assert torch.equal(own, oracle)
    mean = start + sum(added) / MANY
    drift = (sum(found) / MANY - mean).abs().max()
    assert drift <= 0.01 * mean.abs().max()


def test_many_ranks_make_outer_steps_on_one_anchor():
    wanted = targets()

    def train(comm):
        anchor, momentum = torch.zeros(NUMEL), torch.zeros(NUMEL)
        op, x = make_op(comm, "exact"), torch.zeros(NUMEL)
        for round in range(STEPS):
            for _ in range(4):
                x = x - 0.1 * (x - wanted[comm.rank])
            delta = anchor - x
            op.run(delta, step=round + 1)
            _C.outer_step([anchor], [momentum], [delta], lr=0.7, mu=0.5, nesterov=True)
            x = anchor.clone()
        return anchor

    found = run_thread_ranks(MANY, train)
    assert_same_bits(found)
    anchor, momentum, mean = torch.zeros(NUMEL), torch.zeros(NUMEL), sum(wanted) / MANY
    for _ in range(STEPS):
        delta = (1 - 0.9**4) * (anchor - mean)
        momentum = 0.5 * momentum + delta
        anchor = anchor - 0.7 * (delta + 0.5 * momentum)
    assert (found[0] - anchor).abs().max() <= 1e-5
