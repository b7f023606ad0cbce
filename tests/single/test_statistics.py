"""Times and bytes of an engine in situations that are known beforehand."""

import threading
import time

import torch
from bagua import _C
from support.threads.engine_ranks import (
    SECONDS,
    Meeting,
    alone,
    calls,
    mark_all,
    ones,
    plan,
    run_round,
)
from support.threads.thread_ranks import run_thread_ranks, wait_until
from torch.profiler import ProfilerActivity, profile

PAUSE = 0.2
PAUSE_NS = 1e9 * PAUSE
SHORT_NS = 0.7 * PAUSE_NS  # of what should take no time, on a machine with other things to do


def pause(_):
    time.sleep(PAUSE)


def test_computation_of_an_op_is_encoding_and_not_wire():
    engine = alone(plan("b", ones(), 1, calls(pause)))
    run_round(engine)
    run_round(engine)
    (bucket,) = engine.stats()["buckets"]
    assert 2 * PAUSE_NS <= bucket["encode_ns"] == bucket["busy_ns"]
    assert bucket["wire_ns"] == bucket["bytes_sent"] == bucket["messages_received"] == 0


def test_waiting_for_a_late_rank_is_wire_and_not_encoding():
    meeting = Meeting(2)

    def run(comm):
        engine = meeting.engine(comm.rank, [plan("b", ones())])
        engine.begin_round()
        engine.await_agreement()
        if comm.rank == 1:
            time.sleep(PAUSE)
        mark_all(engine)
        engine.wait()
        return engine.stats()["buckets"][0]

    early, late = run_thread_ranks(2, run)
    assert early["wire_ns"] > SHORT_NS
    assert early["encode_ns"] < SHORT_NS
    assert late["busy_ns"] < SHORT_NS
    for bucket in (early, late):
        assert bucket["encode_ns"] + bucket["wire_ns"] == bucket["busy_ns"]


def test_arithmetic_inside_an_exchange_is_encoding():
    """A codec's work in callbacks, while messages are under way, is not time on the wire."""
    meeting = Meeting(2)

    def compressed(lane):
        codec = _C.make_codec("block_uint8")
        return [_C.CompressedAllReduce(lane, codec, _C.Scratch(), _C.ReduceOp.AVG)]

    engines = [
        meeting.engine(rank, [plan("b", torch.randn(2_000_000), 1, compressed)])
        for rank in range(2)
    ]
    other = threading.Thread(target=run_round, args=(engines[1],), daemon=True)
    other.start()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run_round(engines[0])
    other.join()
    profiled_ns = dict.fromkeys(["bagua::encode", "bagua::reduce", "bagua::decode"], 0.0)
    for event in profiler.events():
        if event.name in profiled_ns:
            profiled_ns[event.name] += 1000 * event.time_range.elapsed_us()
    assert min(profiled_ns.values()) > 0
    (bucket,) = engines[0].stats()["buckets"]
    assert bucket["encode_ns"] > 0.95 * sum(profiled_ns.values())
    assert bucket["wire_ns"] > 0


def test_a_bucket_waits_for_its_lane_and_not_for_another():
    for lanes in (1, 2):
        first = plan("first", ones(), 1, calls(pause))
        engine = alone(first, plan("second", ones(), 1, calls(lambda _: None)), lanes=lanes)
        run_round(engine)
        waited = [bucket["waiting_ns"] for bucket in engine.stats()["buckets"]]
        assert waited[0] < SHORT_NS
        assert waited[1] > SHORT_NS if lanes == 1 else waited[1] < SHORT_NS


def test_a_bucket_waits_for_an_earlier_one():
    engine = alone(plan("first", ones(), 1), plan("second", ones(), 1))
    engine.begin_round()
    engine.mark_ready(1)
    time.sleep(PAUSE)
    engine.mark_ready(0)
    engine.wait()
    first, second = engine.stats()["buckets"]
    assert first["waiting_ns"] < SHORT_NS < second["waiting_ns"]


def test_hidden_is_time_in_which_the_caller_was_not_blocked():
    started = threading.Event()

    def twice(_):
        started.set()
        time.sleep(2 * PAUSE)

    engine = alone(plan("b", ones(), 1, calls(twice)))
    engine.begin_round()
    engine.mark_ready(0)
    assert started.wait(SECONDS)
    time.sleep(PAUSE)
    engine.wait()
    stats = engine.stats()
    (bucket,) = stats["buckets"]
    for key in ("busy_ns", "hidden_ns"):
        assert stats[key] == bucket[key]
    assert bucket["hidden_ns"] >= PAUSE_NS
    # What was neither hidden nor exposed: the caller's way back.
    assert 0 <= stats["hidden_ns"] + stats["exposed_ns"] - stats["busy_ns"] < SHORT_NS
    assert stats["exposed_ns"] > 0


def test_a_wait_that_was_too_early_makes_nothing_less_hidden():
    engine = alone(plan("b", ones(), 1, calls(pause)))
    engine.begin_round()
    engine.wait()  # nothing has been launched
    engine.mark_ready(0)
    wait_until(lambda: engine.stats()["buckets"][0]["rounds"] > 0, "the bucket")
    engine.wait()
    stats = engine.stats()
    assert stats["buckets"][0]["hidden_ns"] == stats["buckets"][0]["busy_ns"] >= PAUSE_NS
    assert stats["hidden_ns"] == stats["busy_ns"]


def test_blocking_until_ranks_agree_is_exposed_and_buckets_wait_for_it():
    meeting = Meeting(2)

    def run(comm):
        engine = meeting.engine(comm.rank, [plan("b", ones())])
        if comm.rank == 1:
            time.sleep(PAUSE)
        engine.begin_round()
        mark_all(engine)
        engine.await_agreement()
        exposed = engine.stats()["exposed_ns"]
        engine.wait()
        return exposed, engine.stats()["buckets"][0]["waiting_ns"]

    for early, late in zip(*run_thread_ranks(2, run), strict=True):
        assert early > SHORT_NS > late


def test_lanes_at_the_same_time_count_once_by_the_clock():
    together = threading.Barrier(3, timeout=SECONDS)

    def at_once(_):
        together.wait()
        time.sleep(PAUSE)

    engine = alone(*[plan(str(i), ones(), 1, calls(at_once)) for i in range(3)], lanes=3)
    start = time.monotonic_ns()
    run_round(engine)
    elapsed = time.monotonic_ns() - start
    stats = engine.stats()
    busy = [bucket["busy_ns"] for bucket in stats["buckets"]]
    assert min(busy) >= PAUSE_NS
    assert max(busy) <= stats["busy_ns"] <= elapsed
    assert sum(busy) > 1.5 * stats["busy_ns"]
    assert stats["hidden_ns"] + stats["exposed_ns"] <= elapsed
    assert stats["hidden_ns"] <= stats["busy_ns"]
