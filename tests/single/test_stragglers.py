"""A slow rank: named to those that wait for it, with the seconds, and nothing else happens."""

import re
import time

import pytest
from bagua.torch_api import env
from support.threads.engine_ranks import Meeting, endings, mark_all, ones, plan, run_round

AFTER = 0.4
SLOW = 3.2  # until then a wait is looked at twice, a second and more apart


def reports_of(n, late, be_slow):
    """Warnings of each rank in its second round, in which rank `late` is slow."""
    meeting = Meeting(n)
    reports = [[] for _ in range(n)]
    stats = [None] * n

    def run(rank):
        engine = meeting.engine(
            rank,
            [plan("b", ones(), 4)],
            straggler_after_s=AFTER,
            on_straggler=reports[rank].append,
        )
        run_round(engine)
        if rank == late:
            be_slow(engine)
        else:
            run_round(engine)
        stats[rank] = engine.stats()

    for error, _ in endings(n, run):
        assert error is None
    return reports, stats


def computes_slowly(engine):
    engine.begin_round()
    engine.mark_ready(0)
    time.sleep(SLOW)
    mark_all(engine)
    engine.wait()


def starts_late(engine):
    time.sleep(SLOW)
    run_round(engine)


@pytest.mark.parametrize(
    ("be_slow", "place"),
    [
        (computes_slowly, "is still in round 2: computing, 1 of 4 tensors are ready"),
        (starts_late, "is 1 round behind, in round 1: between two rounds"),
    ],
)
def test_waiting_ranks_are_warned_of_the_straggler_and_its_delay(be_slow, place):
    reports, stats = reports_of(3, 1, be_slow)
    assert reports[1] == []
    for rank in (0, 2):
        first, over = reports[rank]
        me = f"module 'Net', rank {rank} of 3, round 2: "
        seconds = re.match(re.escape(me) + r"has waited (\d\.\d) s for its buckets\. ", first)
        assert AFTER + 1.3 < float(seconds[1]) < SLOW
        assert f"Where the others are: rank 1 {place}" in first
        assert "; rank" not in first  # nobody else is accused
        assert "It goes on waiting until 20 s have passed." in first
        assert re.fullmatch(re.escape(me) + r"its buckets came after 3\.\d s\.", over)
        assert 3.0e9 < stats[rank]["longest_wait_ns"] < 5.0e9
    assert stats[1]["longest_wait_ns"] < 3.0e9


def test_a_short_wait_does_not_warn():
    reports, _ = reports_of(2, 1, lambda engine: (time.sleep(0.2), run_round(engine)))
    assert reports == [[], []]


def test_the_seconds_are_read_from_the_environment(monkeypatch):
    monkeypatch.delenv("BAGUA_STRAGGLER_SECONDS", raising=False)
    assert env.get_straggler_seconds() == 10.0
    monkeypatch.setenv("BAGUA_STRAGGLER_SECONDS", "0.5")
    assert env.get_straggler_seconds() == 0.5
    for wrong in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv("BAGUA_STRAGGLER_SECONDS", wrong)
        with pytest.raises(ValueError, match=r"BAGUA_STRAGGLER_SECONDS='.*' must be a number"):
            env.get_straggler_seconds()
