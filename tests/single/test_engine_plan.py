"""Plans that an engine refuses, and the statistics that it keeps."""

import itertools

import pytest
import torch
from bagua import _C
from support.cases import over
from support.threads.engine_ranks import (
    Meeting,
    alone,
    ones,
    plan,
    run_round,
    slots_of,
)
from support.threads.thread_ranks import run_thread_ranks


@over(n=[1, 2, 3, 4], lanes=[1, 2])
def test_statistics_add_up(n, lanes):
    meeting = Meeting(n, lanes)
    rounds, numel = 3, 12 * 16

    def compressed(lane):
        return [_C.CompressedAllReduce(lane, _C.make_codec("fp16"), _C.Scratch(), _C.ReduceOp.AVG)]

    def run(comm):
        buckets = [plan("exact", ones(numel)), plan("short", ones(numel), 1, compressed)]
        engine = meeting.engine(comm.rank, buckets)
        for _ in range(rounds):
            run_round(engine)
        return engine.stats()

    for stats in run_thread_ranks(n, run):
        exact, short = stats["buckets"]
        assert stats["rounds"] == exact["rounds"] == short["rounds"] == rounds
        assert (exact["name"], exact["bytes"]) == ("exact", 4 * numel)
        assert exact["ops"] == [f"AllReduce(mean, ranks {n})"]
        assert short["ops"] == [f"CompressedAllReduce(fp16, mean, ranks {n})"]
        assert exact["bytes_sent"] == rounds * 2 * 4 * numel * (n - 1) // n
        assert short["bytes_sent"] == rounds * 2 * (n - 1) * (32 + 2 * numel // n)
        assert short["messages_sent"] == rounds * 2 * (n - 1)
        assert stats["control"]["bytes_sent"] == rounds * 56 * (n - 1)
        for bucket in (exact, short):
            assert bucket["bytes_received"] == bucket["bytes_sent"]
            assert 0 <= bucket["hidden_ns"] <= bucket["busy_ns"]
            assert 0 <= bucket["wire_ns"] <= bucket["busy_ns"]
            assert bucket["waiting_ns"] >= 0
        assert stats["exposed_ns"] > 0


def test_a_communicator_belongs_to_one_lane():
    meeting = Meeting(2)
    shared, control = meeting.connect(meeting.lanes[0], 0), meeting.connect(meeting.control, 0)

    def engine(lane_comms):
        lanes = [_C.Lane([plan(str(i), ones())(comm)], [comm]) for i, comm in enumerate(lane_comms)]
        return _C.Engine(
            lanes, name="Net", fingerprint=1, incarnation=1, timeout_s=1.0, control=control
        )

    for comms in ([shared, shared], [control]):
        with pytest.raises(ValueError, match="belongs to one lane, or to the main thread"):
            engine(comms)


def bucket_of(slots, numel=10, flat=None):
    return _C.Bucket("b", torch.zeros(numel) if flat is None else flat, slots, [])


REFUSED = {
    "empty": (lambda: bucket_of([]), "has no slots"),
    "too-long": (
        lambda: bucket_of(slots_of("s", [6, 5])),
        "overlaps its neighbour or the end at 10",
    ),
    "overlap": (
        lambda: bucket_of([*slots_of("s", [4]), *slots_of("t", [4])]),
        "slot 't.0' at 0",
    ),
    "gaps": (
        lambda: bucket_of([_C.Slot("gaps", 0, [2, 2], [4, 1], _C.Adopt.NONE)]),
        "'gaps' is not dense",
    ),
    "no-parameter": (
        lambda: bucket_of([_C.Slot("nameless", 0, [2], [1], _C.Adopt.GRAD_VIEW)]),
        "'nameless' carries a gradient but names no parameter",
    ),
    "2-d": (lambda: bucket_of(slots_of("s", [4]), flat=torch.zeros(2, 5)), "one-dimensional"),
    "strided": (lambda: bucket_of(slots_of("s", [4]), flat=torch.zeros(20)[::2]), "contiguous"),
    "twice": (lambda: alone(plan("b", ones()), plan("b", ones())), "slot 'b.0' occurs twice"),
    "lanes": (lambda: Meeting(1, lanes=0).engine(0, []), "needs a lane"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_a_plan_that_cannot_be_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_dense_slot_may_have_any_order_of_strides():
    orders = itertools.permutations([(2, 12), (3, 4), (4, 1)])
    for order in orders:
        sizes, strides = zip(*order, strict=True)
        slot = _C.Slot("s", 3, list(sizes), list(strides), _C.Adopt.NONE)
        assert bucket_of([slot], numel=27) is not None
