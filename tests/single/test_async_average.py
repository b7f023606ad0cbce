"""Asynchronous averaging on thread ranks: the mean, and updates made during the transfer."""

import threading
import time

import pytest
import torch
from oracle import async_model_average as oracle
from single.average_lane import averages, make_lane, wait_until
from single.op_ranks import DTYPES, assert_same_bits
from single.thread_ranks import run_thread_ranks

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


class Windows:
    """Lets the lane do one thing at a time: snapshot, or apply."""

    def __init__(self, lane):
        self.lane = lane
        lane.enter()

    def open(self, after):
        """The lane is at the gate after so many seconds, and gets in once."""
        time.sleep(after)
        self.lane.leave()
        self.lane.enter()


@RANKS
def test_updates_during_an_average_are_kept_as_in_the_oracle(n):
    rounds = 3
    turn = threading.Barrier(n)
    start = [torch.arange(6, dtype=torch.float64) * (r + 1) for r in range(n)]

    def update(rank, moment):
        return torch.full((6,), float(100 * moment + rank), dtype=torch.float64)

    def run(comm):
        weights = start[comm.rank].clone()
        # Long enough that a rank which is held up in a window does not begin another round.
        lane = make_lane(comm, weights, interval_s=0.3)
        windows = Windows(lane)
        lane.resume()
        for moment in range(2 * rounds):  # even: snapshot, odd: apply
            windows.open(0.36 if moment % 2 == 0 else 0.03)
            turn.wait()
            weights += update(comm.rank, moment)
            turn.wait()
        count = averages(lane)
        lane.stop()  # inside the gate: nothing more is applied
        return weights, count

    expected = oracle.Ranks(start)
    for moment in range(2 * rounds):
        for rank in range(n):
            expected.snapshot(rank) if moment % 2 == 0 else expected.apply(rank)
        for rank in range(n):
            expected.train(rank, update(rank, moment))
    results = run_thread_ranks(n, run)
    for (weights, count), wanted in zip(results, expected.weights, strict=True):
        assert count == rounds
        torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=0)


@RANKS
def test_averages_do_not_change_the_sum_over_ranks_whatever_the_timing(n):
    """Averaging keeps the sum over ranks: a lost update, or one counted twice, would show."""
    steps = 300

    def run(comm):
        weights = torch.zeros(1000, dtype=torch.float64)
        lane = make_lane(comm, weights, interval_s=0.0)
        lane.resume()
        for step in range(steps):
            lane.enter()
            weights += step * (comm.rank + 1)
            lane.leave()
            time.sleep(0.0003 * comm.rank)
        wait_until(lambda: averages(lane) >= 3, "three averages")
        lane.pause()
        return weights, averages(lane)

    results = run_thread_ranks(n, run)
    assert min(count for _, count in results) >= 3
    expected = sum(range(steps)) * sum(range(1, n + 1))
    total = torch.stack([weights for weights, _ in results]).sum(0)
    torch.testing.assert_close(total, torch.full_like(total, expected), rtol=1e-10, atol=0)
