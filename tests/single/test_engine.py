"""The engine: order, rounds and agreement, on thread ranks."""

import random
import struct
import threading

import pytest
import torch
from bagua import _C
from support.cases import over
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
from support.threads.thread_ranks import run_thread_ranks, wait_until


@pytest.mark.parametrize("lanes", [1, 2, 3], ids=lambda lanes: f"{lanes}-lanes")
def test_buckets_launch_in_registration_order_whatever_the_arrival_order(lanes):
    seen = [[] for _ in range(lanes)]

    def note(bucket):
        seen[int(bucket) % lanes].append(int(bucket))

    engine = alone(*[plan(str(i), ones(), 2, calls(note)) for i in range(6)], lanes=lanes)
    orders = [list(range(12)), list(range(11, -1, -1))]
    orders += [random.Random(seed).sample(range(12), 12) for seed in range(10)]
    for order in orders:
        for lane in seen:
            lane.clear()
        engine.begin_round()
        for slot in order:
            assert engine.mark_ready(slot)
        engine.wait()
        assert seen == [list(range(lane, 6, lanes)) for lane in range(lanes)], order


def test_the_first_bucket_is_on_its_way_before_the_last_slot_is_ready():
    meeting = Meeting(2)

    def run(comm):
        running = threading.Event()
        first = plan(
            "first",
            ones(),
            2,
            lambda lane: [
                _C.PythonOp(lambda _: running.set()),
                _C.AllReduce(lane, _C.ReduceOp.SUM),
            ],
        )
        engine = meeting.engine(comm.rank, [first, plan("second", ones())])
        engine.begin_round()
        engine.mark_ready(0)
        engine.mark_ready(1)
        engine.mark_ready(2)
        early = running.wait(SECONDS)
        engine.mark_ready(3)
        engine.wait()
        return early

    assert run_thread_ranks(2, run) == [True, True]


@over(n=[1, 3], lanes=[1, 2, 3])
def test_only_buckets_of_the_part_are_averaged(n, lanes):
    meeting = Meeting(n, lanes=lanes)

    def run(comm):
        flats = [torch.full((10,), float(comm.rank + i)) for i in range(4)]
        buckets = [plan(str(i), flat, part=i % 2) for i, flat in enumerate(flats)]
        engine = meeting.engine(comm.rank, buckets)
        seen = []
        for part in (1, 0, None):
            engine.begin_round(part=part)
            engine.mark_all()
            engine.wait()
            assert not engine.round_open
            seen.append([flat[0].item() for flat in flats])
        return seen, [bucket["rounds"] for bucket in engine.stats()["buckets"]]

    for rank, (seen, rounds) in enumerate(run_thread_ranks(n, run)):
        own, mean = [rank + i for i in range(4)], [(n - 1) / 2 + i for i in range(4)]
        assert seen[0] == [own[0], mean[1], own[2], mean[3]]
        assert seen[1:] == [mean, mean]
        assert rounds == [2] * 4


def test_marks_are_of_an_open_round_and_of_slots_that_exist():
    engine = alone(plan("b", ones()))
    with pytest.raises(_C.BaguaError, match=r"module 'Net', rank 0 of 1.*no round is open"):
        engine.mark_ready(0)
    run_round(engine)
    with pytest.raises(_C.BaguaError, match="no round is open"):
        engine.mark_ready(0)
    engine.begin_round()
    for slot in (2, -1):
        with pytest.raises(IndexError):
            engine.mark_ready(slot)


def test_a_second_mark_in_a_round_changes_nothing_and_says_so():
    ran = []
    engine = alone(plan("b", ones(), 2, calls(ran.append)))
    engine.begin_round()
    assert engine.mark_ready(0) is True
    assert engine.mark_ready(0) is False
    assert ran == []
    assert engine.mark_ready(1) is True
    assert engine.mark_ready(1) is False
    engine.wait()
    assert ran == ["b"]


def test_a_forward_without_backward_keeps_its_round_open():
    ran = []
    engine = alone(plan("b", ones(), 2, calls(ran.append)))
    for _ in range(3):
        engine.begin_round()
        assert (engine.round, engine.round_open) == (1, True)
    mark_all(engine)
    engine.wait()
    assert (engine.round, engine.round_open, ran) == (1, False, ["b"])
    engine.wait()  # nothing is open: nothing to wait for
    engine.begin_round()
    assert engine.round == 2


#: (other options of rank 2's engine, of its round, the words of the error)
DIFFERENCES = {
    "plan": ({"fingerprint": 0xABC}, {}, "bucket plan (rank 0: 1, rank 1: 1, rank 2: abc)"),
    "run": (
        {"incarnation": 0xABC},
        {},
        "incarnation of the run (rank 0: 1, rank 1: 1, rank 2: abc)",
    ),
    "part": ({}, {"part": 0}, "fragment that they average (rank 0: 0, rank 1: 0, rank 2: 1)"),
    "frozen": (
        {},
        {"frozen": 0xABC},
        "parameters that were frozen since the wrap (rank 0: 0, rank 1: 0, rank 2: abc)",
    ),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_ranks_that_differ_start_no_round(kind):
    meeting = Meeting(3)
    of_engine, of_round, words = DIFFERENCES[kind]
    ran = []

    def run(rank):
        buckets = [plan("b", ones(), 2, calls(ran.append))]
        engine = meeting.engine(rank, buckets, **(of_engine if rank == 2 else {}))
        engine.begin_round(**(of_round if rank == 2 else {}))
        mark_all(engine)
        engine.wait()

    for error, _ in endings(3, run):
        assert isinstance(error, _C.BaguaMismatchError)
        assert f"ranks differ in the {words}" in str(error)
        assert "round 1 was not started" in str(error)
        assert kind != "frozen" or "requires_grad must change on all ranks" in str(error)
    assert ran == []


@pytest.mark.parametrize("how", ["by_the_board", "by_a_lost_connection"])
def test_a_rank_that_is_told_of_a_difference_raises_it_as_its_own(how):
    """The others may be through with the agreement, and say so, before this rank is."""
    meeting, elsewhere = Meeting(2), Meeting(2)  # a late rank meets nobody; the boards are one
    elsewhere.store = meeting.store
    late = elsewhere.engine(1, [plan("b", ones())], fingerprint=2)
    others = [
        meeting.engine(rank, [plan("b", ones())], fingerprint=1 + rank, board=rank == 0)
        for rank in range(2)
    ]
    if how == "by_the_board":
        late.begin_round()
    results = endings(2, lambda rank: run_round(others[rank]))
    if how == "by_a_lost_connection":
        meeting.store.wait(["failed"])  # a rank may raise before its thread has said so
        elsewhere.connect(elsewhere.control, 0).abort("gone")
        late.begin_round()
    with pytest.raises(_C.BaguaMismatchError) as caught:
        late.await_agreement()
    assert "ranks differ in the bucket plan (rank 0: 1, rank 1: 2)" in str(caught.value)
    if how == "by_the_board":
        assert str(caught.value) == str(results[1][0])


@pytest.mark.parametrize("theirs", [1, 4], ids=["behind", "ahead"])
def test_a_rank_in_another_round_starts_no_round(theirs):
    meeting = Meeting(2)
    ran = []

    def run(rank):
        if rank == 1:  # answers with the documented record: fingerprint, round, incarnation, ...
            raw = _C.ThreadCommunicator(meeting.control, 1)
            everyone = torch.zeros(112, dtype=torch.uint8)
            for step in (1, theirs):
                record = torch.frombuffer(
                    bytearray(struct.pack("<7Q", 1, step, 1, 0, 0, 0, 0)), dtype=torch.uint8
                )
                raw.all_gather(record, everyone)
            return
        engine = meeting.engine(rank, [plan("b", ones(), 2, calls(ran.append))])
        run_round(engine)
        run_round(engine)

    (error, _), (no_error, _) = endings(2, run)
    assert no_error is None
    assert isinstance(error, _C.BaguaMismatchError)
    assert f"number of synchronising steps (rank 0: 2, rank 1: {theirs})" in str(error)
    assert ran == ["b"]


def test_a_rank_that_exits_before_it_sends_its_used_slots_is_named_soon():
    meeting = Meeting(2)

    def run(rank):
        engine = meeting.engine(rank, [plan("b", ones())])
        engine.begin_round()
        mark_all(engine)
        if rank == 0:
            engine.exchange_used([1, 1])
            engine.wait()
        wait_until(lambda: engine.stats()["buckets"][0]["rounds"] > 0, "the bucket")
        engine.stop()

    (error, seconds), (other, _) = endings(2, run)
    assert other is None
    assert "rank 1 exited after 0 rounds" in str(error)
    assert seconds < 1.5  # the others ask every half second


def test_others_read_how_far_a_rank_is():
    meeting, gate = Meeting(2), threading.Event()
    ops = [calls(lambda _: None), calls(lambda _: gate.wait(SECONDS))]
    here, there = [
        meeting.engine(rank, [plan(str(i), ones(), 2, op) for i, op in enumerate(ops)])
        for rank in range(2)
    ]
    here.begin_round()
    there.begin_round()

    def wait_for(text):
        wait_until(lambda: meeting.store.get("beat/0").decode().endswith(text), text)

    here.mark_ready(0)
    here.mark_ready(1)
    wait_for("computing, 2 of 4 tensors are ready, 1 of 2 buckets are done")
    here.mark_ready(2)
    here.mark_ready(3)
    wait_for("communicating, 1 of 2 buckets are done, bucket '1' is under way")
    gate.set()
    here.wait()
    mark_all(there)
    there.wait()
    wait_for("between two rounds")
