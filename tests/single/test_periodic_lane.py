"""The periodic lane and its gate on thread ranks: who goes first, and how it ends."""

import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from support.threads.average_lane import averages, let_through, make_lane
from support.threads.thread_ranks import run_thread_ranks, wait_until

# The gate.


def test_no_average_is_applied_while_training_is_inside():
    def run(comm):
        weights = torch.full((10,), float(comm.rank))
        lane = make_lane(comm, weights)
        lane.enter()
        lane.resume()
        wait_until(lambda: lane.at_gate, "the lane at the gate")
        time.sleep(0.05)
        inside = weights.clone(), averages(lane), lane.inside
        lane.leave()
        wait_until(lambda: averages(lane) > 0, "an average after leave()")
        lane.pause()
        return inside, weights

    for rank, ((before, count, is_inside), after) in enumerate(run_thread_ranks(2, run)):
        assert (before.tolist(), count, is_inside) == ([float(rank)] * 10, 0, True)
        assert after.tolist() == [0.5] * 10


def test_a_lane_that_waits_goes_before_a_training_that_hardly_ever_leaves():
    rounds = 100

    def run(comm):
        lane = make_lane(comm, torch.zeros(10), interval_s=0.0)
        lane.enter()
        lane.resume()
        # A snapshot and an apply each: a plain mutex would give training the gate back at once.
        for _ in range(2 * rounds):
            let_through(lane)
        wait_until(lambda: lane.at_gate, "the next snapshot")
        count = averages(lane)
        lane.pause()
        return count

    # A lane that is quick may do both at once.
    assert min(run_thread_ranks(2, run)) >= rounds


# Ending.


def test_pause_waits_for_the_last_rank_and_rounds_go_on_until_then_and_after_resume():
    late = threading.Event()

    def run(comm):
        weights = torch.full((4,), float(comm.rank))
        lane = make_lane(comm, weights)
        lane.resume()
        if comm.rank == 1:
            wait_until(lambda: averages(lane) > 0, "the first average")
            before = averages(lane)
            wait_until(lambda: averages(lane) > before + 3, "more averages")
            assert not late.is_set(), "rank 0 was let go before rank 1 paused"
        lane.pause()
        late.set()
        lane.pause()
        paused = averages(lane)
        weights.fill_(float(comm.rank))
        lane.resume()
        lane.resume()
        wait_until(lambda: averages(lane) > paused, "an average after resume()")
        lane.pause()
        assert weights.tolist() == [0.5] * 4
        return paused, averages(lane)

    first, second = run_thread_ranks(2, run)
    assert first == second


def test_pause_that_waits_no_longer_than_asked_says_so():
    meet = threading.Barrier(2)

    def run(comm):
        lane = make_lane(comm, torch.zeros(4))
        lane.resume()
        within = lane.pause(0.05) if comm.rank == 0 else None
        meet.wait()
        return within, lane.pause()

    assert run_thread_ranks(2, run) == [(False, True), (None, True)]


def test_a_rank_that_stops_alone_is_an_error_for_the_others_from_then_on():
    def run(comm):
        lane = make_lane(comm, torch.zeros(4))
        lane.resume()
        wait_until(lambda: averages(lane) > 0, "an average")
        if comm.rank == 1:
            comm.abort("gone")
            lane.stop()
            return None
        wait_until(lambda: not lane.running, "the failure")
        errors = []
        for call in (lane.check, lane.resume, lane.check):
            with pytest.raises(_C.BaguaError) as caught:
                call()
            errors.append(str(caught.value))
        lane.enter()  # training may go on by itself
        lane.leave()
        assert lane.pause(), "who knows of the failure may end in peace"
        return errors

    errors, _ = run_thread_ranks(2, run)
    for error in errors:
        assert "module 'net', rank 0 of 2, asynchronous averaging: " in error
        assert "Every rank must call abort(model) before it ends; wrap the module again" in error


def test_an_unseen_failure_is_raised_by_pause():
    def run(comm):
        lane = make_lane(comm, torch.zeros(4))
        lane.resume()
        if comm.rank == 1:
            comm.abort("gone")
            return None
        wait_until(lambda: not lane.running, "the failure")
        with pytest.raises(_C.BaguaError, match="asynchronous averaging"):
            lane.pause()
        return lane.pause()

    assert run_thread_ranks(2, run)[0] is True


def test_stop_inside_the_gate_ends_at_once():
    def run(comm):
        lane = make_lane(comm, torch.zeros(4))
        lane.enter()
        lane.resume()
        wait_until(lambda: lane.at_gate, "the lane at the gate")
        start = time.monotonic()
        lane.stop()
        lane.stop()
        return time.monotonic() - start, lane.running

    for seconds, running in run_thread_ranks(2, run):
        assert seconds < 0.9, "the thread had to be given up"
        assert not running


def test_a_rank_without_others_averages_nothing():
    lane = make_lane(_C.ThreadCommunicator(_C.ThreadHub(1, 5.0), 0), torch.ones(4))
    lane.leave()
    lane.enter()
    lane.enter()
    assert lane.inside
    lane.leave()
    assert not lane.inside
    lane.leave()
    lane.resume()
    assert not lane.running
    assert lane.pause()
    assert averages(lane) == 0


# What it tells.


def test_stats_count_averages_bytes_and_waiting():
    def run(comm):
        weights = torch.zeros(1000)
        lane = make_lane(comm, weights, interval_s=0.0)
        lane.enter()
        lane.resume()
        wait_until(lambda: lane.at_gate, "the lane at the gate")
        time.sleep(0.05)
        lane.leave()
        wait_until(lambda: averages(lane) >= 3, "three averages")
        lane.pause()
        return lane.stats()

    for stats in run_thread_ranks(2, run):
        (bucket,) = stats["buckets"]
        assert bucket["ops"] == ["AsyncAverage(ranks 2)"]
        assert bucket["bytes"] == 4000
        assert bucket["rounds"] == stats["rounds"] >= 3
        # One byte a round, and one more when all wanted to stop.
        assert bucket["bytes_sent"] == stats["rounds"] * (4000 + 1) + 1
        assert bucket["waiting_ns"] > 0.02e9, "the lane waited at the gate"
        assert bucket["busy_ns"] > 0


@pytest.mark.parametrize(
    ("weights", "interval_s", "words"),
    [
        ([torch.zeros(4, 4).t()[:2]], 0.1, "must be contiguous and floating"),
        ([torch.zeros(4, dtype=torch.int64)], 0.1, "must be contiguous and floating"),
        ([], 0.1, "needs a communicator, a gate and weights"),
        ([torch.zeros(4)], -1.0, "interval of a periodic lane is -1000 ms"),
    ],
    ids=["not-contiguous", "integers", "nothing", "negative-interval"],
)
def test_weights_that_cannot_be_averaged_are_refused(weights, interval_s, words):
    with pytest.raises(ValueError, match=words):
        make_lane(_C.ThreadCommunicator(_C.ThreadHub(1, 5.0), 0), weights, interval_s)


def test_a_pause_that_others_have_not_asked_for_ends_at_the_timeout_and_says_who():
    store, through = dist.HashStore(), threading.Barrier(2)

    def run(comm):
        board = _C.FailureBoard(store, comm.rank, comm.size)
        lane = make_lane(comm, torch.zeros(10), timeout_s=1.0, board=board)
        lane.resume()
        wait_until(lambda: averages(lane) > 0, "an average")
        error, start = None, time.monotonic()
        if comm.rank == 0:
            with pytest.raises(_C.BaguaTimeoutError) as caught:
                lane.pause()
            error = str(caught.value)
        seconds = time.monotonic() - start
        through.wait(20.0)
        lane.pause()  # now all have
        return error, seconds

    (error, seconds), _ = run_thread_ranks(2, run)
    assert "rank 0 of 2: asynchronous averaging has not ended within 1000 ms" in error
    assert "abort(model) must be called on all" in error
    assert re.search(r"rank 1 is .*: averaging, has not asked to end it", error)
    assert seconds < 5.0


def test_who_leaves_because_it_failed_is_not_the_one_that_left():
    store = dist.HashStore()

    def run(comm):
        board = _C.FailureBoard(store, comm.rank, comm.size)
        lane = make_lane(comm, torch.zeros(10), board=board)
        lane.resume()
        wait_until(lambda: averages(lane) > 0, "an average")
        if comm.rank == 0:
            comm.abort("cut off")
        wait_until(lambda: not lane.running, "the failure")
        lane.stop()
        return board.poll_exit(10**6)

    assert run_thread_ranks(2, run) == [None, None]
