"""Failures of an engine: on this rank, on the other ranks, and at its destruction."""

import gc
import threading
import time

import pytest
import torch
from bagua import _C
from support.processes.thread_names import thread_names
from support.threads.engine_ranks import (
    SECONDS,
    Meeting,
    alone,
    calls,
    endings,
    mark_all,
    ones,
    plan,
    run_round,
)

# Another rank's failure is asked for every half second; the rest is for a busy machine. Without the
# news the transports here end after 5 seconds, or 20.
SECONDS_UNTIL_TOLD = 4.0
# A lane that cannot be ended is given up after one.
SECONDS_UNTIL_GONE = 5.0  # long before the lane ends by itself


def unlisted(hub, rank):
    """`ops` over a communicator that the lane does not list, so that no abort reaches it: what
    gloo is like. Its call ends at the hub's own timeout."""
    return lambda _: [_C.AllReduce(_C.ThreadCommunicator(hub, rank), _C.ReduceOp.SUM)]


def fail(bucket):
    raise ZeroDivisionError(f"the reason in {bucket}")


def test_an_exception_in_an_op_arrives_at_wait_with_bucket_op_rank_and_round():
    engine = alone(
        plan("good", ones(), 2, calls(lambda _: None)), plan("bad", ones(), 2, calls(fail))
    )
    engine.begin_round()
    mark_all(engine)
    with pytest.raises(_C.BaguaError) as caught:
        engine.wait()
    place = "module 'Net', rank 0 of 1, round 1, bucket 'bad' (32 bytes), PythonOp(fail): "
    assert str(caught.value).startswith(place + "ZeroDivisionError: the reason in bad")
    assert "test_engine_failures.py" in str(caught.value)  # the traceback
    good, bad = engine.stats()["buckets"]
    assert good["rounds"] == 1
    assert bad["rounds"] == bad["busy_ns"] == 0


def test_an_engine_that_failed_refuses_further_work_with_the_same_words():
    engine = alone(plan("bad", ones(), 1, calls(fail)))
    with pytest.raises(_C.BaguaError) as first:
        run_round(engine)
    for call in (
        engine.begin_round,
        engine.wait,
        engine.await_agreement,
        lambda: engine.mark_ready(0),
    ):
        with pytest.raises(_C.BaguaError) as again:
            call()
        assert str(again.value) == str(first.value)


@pytest.mark.parametrize("others", ["listed", "unlisted"])
def test_a_failing_op_is_named_on_all_ranks_whatever_their_transport(others):
    meeting = Meeting(3)
    blocked = _C.ThreadHub(3, 5.0)
    engines = []  # destroyed after the clocks have stopped

    def run(rank):
        ops = unlisted(blocked, rank) if others == "unlisted" else None
        engine = meeting.engine(rank, [plan("b", ones(), 2, calls(fail) if rank == 1 else ops)])
        engines.append(engine)
        run_round(engine)

    for error, seconds in endings(3, run):
        assert type(error) is _C.BaguaError
        assert "rank 1 of 3, round 1, bucket 'b'" in str(error)
        assert "PythonOp(fail)" in str(error)
        assert "the reason in b" in str(error)
        assert seconds < SECONDS_UNTIL_TOLD
    for engine in engines:
        engine.stop()


def test_a_wait_that_takes_too_long_names_rank_and_unfinished_buckets():
    meeting = Meeting(2)
    other_done = threading.Barrier(2)

    def run(rank):
        buckets = [
            plan("done", ones(), 2, calls(lambda _: None)),
            plan("stuck", ones()),
            plan("behind", ones()),
            plan("unmarked", ones()),
        ]
        engine = meeting.engine(rank, buckets, timeout=0.3)
        engine.begin_round()
        try:
            if rank == 0:
                for slot in range(7):
                    engine.mark_ready(slot)
                engine.wait()
        finally:
            other_done.wait(SECONDS)

    (error, seconds), (silent, _) = endings(2, run)
    assert silent is None
    assert isinstance(error, _C.BaguaTimeoutError)
    text = str(error)
    assert "module 'Net', rank 0 of 2, round 1: no result within 300 ms" in text
    assert "outstanding: 'stuck', 'behind'." in text
    assert "raise timeout= of init_process_group" in text
    assert 0.3 <= seconds < SECONDS


def test_a_rank_that_never_starts_the_round_is_a_timeout_too():
    meeting = Meeting(2)
    engine = meeting.engine(0, [plan("b", ones())], timeout=0.3)
    engine.begin_round()
    with pytest.raises(_C.BaguaTimeoutError, match="waiting for all ranks to start the round"):
        engine.await_agreement()


def exits_before_any_round(engine):
    engine.stop()


def exits_between_rounds(engine):
    run_round(engine)
    engine.stop()


def exits_in_a_round(engine):
    run_round(engine)
    engine.begin_round()
    engine.mark_ready(0)
    engine.stop()


def aborts(engine):
    run_round(engine)
    engine.abort("out of data")
    run_round(engine)


def leaves_a_round_unfinished(engine):
    run_round(engine)
    engine.begin_round()
    engine.mark_ready(0)
    engine.begin_round()


ENDS = {
    exits_before_any_round: "rank 1 exited after 0 rounds",
    exits_between_rounds: "rank 1 exited after 1 rounds",
    exits_in_a_round: "rank 1 exited after 1 rounds",
    aborts: "out of data",
    leaves_a_round_unfinished: "rank 1 of 3, round 2: the round was left unfinished, 1 of 2",
}


@pytest.mark.parametrize(("end", "words"), ENDS.items())
def test_a_rank_that_ends_the_rounds_is_named_soon(end, words):
    meeting = Meeting(3)

    def run(rank):
        engine = meeting.engine(rank, [plan("b", ones())])
        if rank == 1:
            return end(engine)
        for _ in range(3):
            run_round(engine)

    for rank, (error, seconds) in enumerate(endings(3, run)):
        if rank == 1 and "exited" in words:
            assert error is None
            continue
        assert isinstance(error, _C.BaguaError)
        assert words in str(error)
        assert not str(error).rstrip().endswith(":"), error
        assert "unfinished" not in words or "Wrap the model again" in str(error)
        assert seconds < SECONDS_UNTIL_TOLD


def test_a_rank_that_exits_after_the_last_round_disturbs_no_other():
    meeting = Meeting(3)

    def run(rank):
        engine = meeting.engine(rank, [plan("b", ones())])
        run_round(engine)
        engine.begin_round()
        if rank == 0:
            time.sleep(0.8)  # late, so that the others ask whether somebody left
        mark_all(engine)
        engine.wait()
        engine.stop()

    assert [error for error, _ in endings(3, run)] == [None, None, None]


def test_an_engine_that_was_stopped_says_so():
    engine = alone(plan("b", ones()))
    run_round(engine)
    engine.stop()
    engine.stop()
    with pytest.raises(_C.BaguaError, match="has been stopped; wrap again"):
        engine.begin_round()


def test_an_engine_goes_soon_even_while_its_lane_is_blocked():
    meeting = Meeting(2)
    blocked = _C.ThreadHub(2, 10.0)
    engine = meeting.engine(0, [plan("b", ones(), 2, unlisted(blocked, 0))])
    others = meeting.engine(1, [plan("b", ones(), 2, calls(lambda _: None))])
    for each in (engine, others):
        each.begin_round()
        mark_all(each)
    others.wait()
    start = time.monotonic()
    del engine
    gc.collect()
    assert time.monotonic() - start < SECONDS_UNTIL_GONE


def test_a_lane_that_was_given_up_keeps_its_memory_until_it_ends():
    meeting = Meeting(2)
    blocked = _C.ThreadHub(2, 20.0)
    flats = [torch.full((100000,), float(rank + 1)) for rank in range(2)]
    running = threading.Event()

    def ops(rank):
        begun = _C.PythonOp(lambda _: running.set())
        return lambda lane: [begun, *unlisted(blocked, rank)(lane)]

    engines = [
        meeting.engine(rank, [plan("b", flats[rank], 2, ops(rank))], board=False)
        for rank in range(2)
    ]
    for engine in engines:
        engine.begin_round()
    mark_all(engines[0])
    assert running.wait(SECONDS)
    address = flats[0].data_ptr()
    del engine, flats[0], engines[0]  # the lane is blocked in the all-reduce and owns the bucket
    gc.collect()
    taken = [torch.zeros(100000) for _ in range(20)]
    mark_all(engines[0])
    engines[0].wait()
    assert torch.equal(flats[0], torch.full((100000,), 3.0))
    assert address not in [tensor.data_ptr() for tensor in taken]
    assert all(not tensor.any() for tensor in taken)


def test_an_engine_frees_its_threads_and_memory():
    def lanes_alive():
        return sum(name.startswith("bagua-lane") for name in thread_names())

    before = lanes_alive()
    engine = alone(plan("b", ones()), lanes=3)
    run_round(engine)
    assert lanes_alive() >= 3
    del engine
    gc.collect()
    assert lanes_alive() <= before  # other tests' may have ended meanwhile
