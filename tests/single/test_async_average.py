"""Asynchronous averaging on thread ranks: the mean, and updates made during the transfer."""

import threading

import pytest
import torch
from bagua import _C
from oracle import async_model_average as oracle
from support.threads.average_lane import averages, let_through, make_lane
from support.threads.op_ranks import DTYPES, assert_same_bits
from support.threads.thread_ranks import run_thread_ranks, wait_until

per_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
RANKS = pytest.mark.parametrize("n", [2, 3, 4], ids=lambda n: f"{n}-ranks")


def average_once(comm, weights):
    """The weights after at least one average of weights that nobody trains."""
    lane = make_lane(comm, weights)
    lane.resume()
    wait_until(lambda: averages(lane) > 0, "an average")
    lane.pause()
    assert not lane.running
    return weights


@per_dtype
@RANKS
def test_without_training_all_ranks_get_the_same_mean(n, dtype):
    brought = [torch.randn(70001, generator=torch.manual_seed(r)).to(dtype) for r in range(n)]
    results = run_thread_ranks(n, lambda comm: average_once(comm, brought[comm.rank].clone()))
    assert_same_bits(results)
    mean = torch.stack([b.double() for b in brought]).mean(0)
    bound = {torch.float64: 1e-15, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)
    torch.testing.assert_close(results[0].double(), mean, rtol=bound, atol=bound)


def test_halves_are_summed_in_f32():
    """60000 + 60000 is infinite in f16; 256 + 3 and 256 + 3 is not what bf16 makes of it."""
    f16 = run_thread_ranks(2, lambda c: average_once(c, torch.full((5,), 6e4).half()))
    assert torch.equal(f16[0], torch.full((5,), 6e4).half())
    bf16 = [torch.tensor([256.0]).bfloat16(), torch.tensor([260.0]).bfloat16()]
    bf16.append(torch.tensor([258.0]).bfloat16())
    results = run_thread_ranks(3, lambda c: average_once(c, bf16[c.rank].clone()))
    assert [r.item() for r in results] == [258.0] * 3


def test_several_buckets_of_several_dtypes_are_averaged_together():
    def run(comm):
        weights = [torch.full((3,), float(comm.rank)), torch.full((5,), 2.0 * comm.rank).half()]
        return average_once(comm, weights)

    for first, second in run_thread_ranks(2, run):
        assert first.tolist() == [0.5] * 3
        assert second.tolist() == [1.0] * 5


# What training does between snapshot and apply is kept.


@RANKS
def test_updates_during_an_average_are_kept_as_in_the_oracle(n):
    """Gates and clocks let the lanes of n ranks do one thing at a time: snapshot, or apply.

    One rank more, which does not train, takes its snapshot last: until then there is no mean, which
    a quick lane would apply at once.
    """
    rounds = 3
    turn = threading.Barrier(n + 1, timeout=30.0)
    start = [torch.arange(6, dtype=torch.float64) * (r + 1) for r in range(n + 1)]

    def update(rank, moment):
        return torch.full((6,), float(100 * moment + rank), dtype=torch.float64)

    def begin_round(number, lane, clock):
        if number == 0:
            lane.resume()
        else:
            clock.turn(1.0)

    def train(rank, lane, clock, weights):
        lane.enter()
        for number in range(rounds):
            begin_round(number, lane, clock)
            let_through(lane)  # snapshot
            weights += update(rank, 2 * number)
            turn.wait()
            let_through(lane)  # apply
            weights += update(rank, 2 * number + 1)
            wait_until(lambda: clock.waiting, "the interval")
            turn.wait()

    def go_last(lane, clock):
        for number in range(rounds):
            lane.enter()
            begin_round(number, lane, clock)
            turn.wait()
            lane.leave()
            wait_until(lambda number=number: averages(lane) > number, "the average")
            wait_until(lambda: clock.waiting, "the interval")
            turn.wait()

    def run(comm):
        weights, clock = start[comm.rank].clone(), _C.ManualClock()
        lane = make_lane(comm, weights, interval_s=1.0, clock=clock)
        if comm.rank == n:
            go_last(lane, clock)
        else:
            train(comm.rank, lane, clock, weights)
        count = averages(lane)
        lane.stop()
        return weights, count

    expected = oracle.Ranks(start)
    for moment in range(2 * rounds):
        for rank in range(n + 1):
            expected.snapshot(rank) if moment % 2 == 0 else expected.apply(rank)
        for rank in range(n):
            expected.train(rank, update(rank, moment))
    results = run_thread_ranks(n + 1, run)
    for (weights, count), wanted in zip(results, expected.weights, strict=True):
        assert count == rounds
        torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=0)
