"""Dynamic lanes on thread ranks: order, agreement, failures, statistics, the end."""

import threading
import time

import pytest
import torch
from bagua import _C, BaguaError, BaguaMismatchError
from support.threads.engine_ranks import SECONDS, Meeting, endings

MEAN, SUM = _C.ReduceOp.AVG, _C.ReduceOp.SUM


class Rank:
    """A lane of one rank of a meeting, and its communicator."""

    def __init__(self, meeting, rank, board=True):
        self.rank = rank
        self.comm = meeting.connect(meeting.lanes[0], rank)
        self.lane = _C.DynamicLane(
            name="Net",
            incarnation=1,
            ops=[self.comm],
            control=meeting.connect(meeting.control, rank),
            board=_C.FailureBoard(meeting.store, rank, meeting.size) if board else None,
        )

    def operations(self, name="0", ops=None, scale=1.0, description="all-reduce"):
        made = [_C.AllReduce(self.comm, MEAN)] if ops is None else ops
        return _C.BucketOperations(name, description, made, scale)

    def post(self, flat, round=1, **arguments):
        return self.lane.post(self.operations(**arguments), flat, round=round)


def on_ranks(n, function, hub_timeout=20.0, board=True):
    """The errors of `function(Rank)` by rank; every lane is stopped when all are through."""
    meeting = Meeting(n, hub_timeout=hub_timeout)
    ranks = [Rank(meeting, rank, board) for rank in range(n)]
    try:
        return [error for error, _ in endings(n, lambda rank: function(ranks[rank]))]
    finally:
        for rank in ranks:
            rank.lane.stop()


def raise_all(errors):
    for error in errors:
        if error is not None:
            raise error


@pytest.mark.parametrize("n", [1, 2, 3, 4], ids="{}_ranks".format)
def test_jobs_give_the_mean_on_all_ranks(n):
    def run(rank):
        for round in range(1, 6):
            flats = [torch.full((size,), float(rank.rank + round)) for size in (1, 31, 4096)]
            posted = [
                rank.post(flat, round, name=str(i), scale=0.5) for i, flat in enumerate(flats)
            ]
            for job in posted:
                job.wait()
            for flat in flats:
                assert torch.equal(flat, torch.full_like(flat, (round + (n - 1) / 2) / 2))

    raise_all(on_ranks(n, run))


def test_jobs_run_in_call_order_whatever_arrives_first():
    seen = {0: [], 1: []}

    def run(rank):
        def note(name):
            seen[rank.rank].append(name)

        time.sleep(0.2 * rank.rank)  # one rank has posted everything before the other begins
        ops = [_C.PythonOp(note), _C.AllReduce(rank.comm, MEAN)]
        posted = [rank.post(torch.ones(4), name=str(i), ops=ops) for i in range(40)]
        for job in posted:
            job.wait()

    raise_all(on_ranks(2, run))
    assert seen[0] == seen[1] == [str(i) for i in range(40)]


DIFFERENCES = {
    "numel": ({"flat": 5}, "5 x float32"),
    "dtype": ({"dtype": torch.float64}, "4 x float64"),
    "round": ({"round": 3}, "round 3"),
    "operation": ({"description": "8 bit"}, "8 bit"),
    "name": ({"name": "7"}, "bucket '7'"),
}


@pytest.mark.parametrize(("change", "said"), DIFFERENCES.values(), ids=DIFFERENCES)
@pytest.mark.parametrize("place", [0, 2], ids=["first_job", "third_job"])
def test_ranks_that_post_different_jobs_are_told_both_sides(change, said, place):
    done = []

    def run(rank):
        posted = []
        for i in range(place + 1):
            own = {"flat": 4, "dtype": torch.float32, "round": 2, "name": "0"}
            own["description"] = "all-reduce"
            if rank.rank == 1 and i == place:
                own |= change
            flat = torch.ones(own.pop("flat"), dtype=own.pop("dtype"))
            posted.append(rank.post(flat, own.pop("round"), **own))
        for i, job in enumerate(posted):
            job.wait()
            done.append(i)

    errors = on_ranks(2, run)
    for error in errors:
        assert type(error) is BaguaMismatchError
        assert "Rank 0: bucket '0' of round 2: 4 x float32, all-reduce; rank 1: " in str(error)
        assert said in str(error)
    assert sorted(done) == sorted([*range(place)] * 2)


def test_a_rank_that_is_told_of_a_difference_raises_it_as_its_own():
    """The others may be through with the comparison, and say so, before this rank is."""
    meeting, elsewhere = Meeting(2), Meeting(2)  # a late rank meets nobody; the boards are one
    elsewhere.store = meeting.store
    late = Rank(elsewhere, 1)
    others = [Rank(meeting, 0), Rank(meeting, 1, board=False)]
    waits = late.post(torch.ones(5), 2)
    results = endings(2, lambda rank: others[rank].post(torch.ones(4 + rank), 2).wait())
    with pytest.raises(BaguaMismatchError) as caught:
        waits.wait()
    assert "Rank 0: bucket '0' of round 2: 4 x float32, all-reduce; rank 1: " in str(caught.value)
    assert str(caught.value) == str(results[1][0])
    for rank in (late, *others):
        rank.lane.stop()


def test_a_failed_lane_refuses_further_jobs_with_the_same_error():
    def run(rank):
        posted = threading.Event()

        def fail(name):
            posted.wait(SECONDS)
            raise ValueError("out of paper")

        first = rank.post(torch.ones(4), ops=[_C.PythonOp(fail)])
        second = rank.post(torch.ones(4))
        posted.set()
        texts = []
        for call in (first.wait, second.wait, rank.lane.check, lambda: rank.post(torch.ones(4))):
            with pytest.raises(BaguaError, match="out of paper") as caught:
                call()
            texts.append(str(caught.value))
        assert len(set(texts)) == 1
        assert "rank 0 of 1, round 1, bucket '0'" in texts[0]

    raise_all(on_ranks(1, run))


def test_abort_ends_what_the_others_wait_for():
    def run(rank):
        if rank.rank == 0:
            rank.lane.abort("enough")
        else:
            with pytest.raises(BaguaError, match="enough"):
                rank.post(torch.ones(4)).wait()

    start = time.monotonic()
    raise_all(on_ranks(2, run))
    assert time.monotonic() - start < SECONDS


def test_a_rank_that_stops_is_named():
    def run(rank):
        rank.post(torch.ones(4), round=1).wait()
        if rank.rank == 1:
            rank.lane.stop()
        else:
            rank.post(torch.ones(4), round=2).wait()

    errors = on_ranks(2, run, hub_timeout=2.0)
    assert errors[1] is None
    assert str(errors[0]).startswith("rank 1 exited after 1 rounds")


def test_a_rank_that_posts_less_is_named_at_the_timeout():
    def run(rank):
        rank.post(torch.ones(4), round=1).wait()
        if rank.rank == 0:
            rank.post(torch.ones(4), round=2).wait()
        else:
            time.sleep(4)

    errors = on_ranks(2, run, hub_timeout=1.0)
    assert "rank 1 is 1 round behind, in round 1: computing, 1 jobs are done" in str(errors[0])


def test_stop_ends_a_job_that_waits_for_others():
    meeting = Meeting(2, hub_timeout=30.0)
    rank = Rank(meeting, 0)
    job = rank.post(torch.ones(4))
    stopper = threading.Timer(0.3, rank.lane.stop)
    stopper.start()
    with pytest.raises(BaguaError, match="was stopped"):
        job.wait()
    stopper.join()
    with pytest.raises(BaguaError, match="was stopped"):
        rank.post(torch.ones(4))


def test_statistics_count_each_bucket():
    def run(rank):
        for round in (1, 2):
            jobs = [rank.post(torch.ones(n), round, name=name) for name, n in (("0", 4), ("1", 8))]
            for job in jobs:
                job.wait()
        stats = rank.lane.stats()
        assert stats["rounds"] == 2
        assert [bucket["name"] for bucket in stats["buckets"]] == ["0", "1"]
        assert [bucket["bytes"] for bucket in stats["buckets"]] == [16, 32]
        assert [bucket["bytes_sent"] for bucket in stats["buckets"]] == [32, 64]
        for bucket in stats["buckets"]:
            assert bucket["rounds"] == 2
            assert 0 < bucket["wire_ns"] <= bucket["busy_ns"]
            assert bucket["encode_ns"] == bucket["busy_ns"] - bucket["wire_ns"]
        assert 0 < stats["control"]["messages_sent"] <= 4

    raise_all(on_ranks(2, run))


def test_jobs_that_wait_share_an_agreement():
    counts = {}

    def run(rank):
        block = threading.Event()
        first = rank.post(torch.ones(4), ops=[_C.PythonOp(lambda name: block.wait(SECONDS))])
        posted = [rank.post(torch.ones(4), name=str(i)) for i in range(30)]
        block.set()
        for job in [first, *posted]:
            job.wait()
        counts[rank.rank] = rank.lane.stats()["control"]["messages_sent"]

    raise_all(on_ranks(2, run))
    assert counts[0] == counts[1] <= 1 + 3 + 2  # 30 jobs, at most 13 in a message


def test_a_wrong_job_is_refused_and_the_lane_goes_on():
    def run(rank):
        for flat, round in ((torch.ones(2, 2), 1), (torch.ones(8)[::2], 1), (torch.ones(4), 0)):
            with pytest.raises(ValueError, match="job '0'"):
                rank.post(flat, round)
        rank.post(torch.ones(4)).wait()

    raise_all(on_ranks(1, run))
