"""A slow rank: named to those that wait for it, with the seconds, and nothing else happens."""

import time

import pytest
from bagua import _C
from bagua.torch_api import env
from support.threads.engine_ranks import Meeting, endings, mark_all, ones, plan, run_round
from support.threads.thread_ranks import wait_until

AFTER = 10.0  # seconds of the clock that the test turns
BETWEEN_LOOKS = 1.3  # at the heartbeats, which take the machine's time


class Ranks:
    """Engines of `n` ranks whose waits are measured by clocks that the late one turns."""

    def __init__(self, n, late):
        self.meeting = Meeting(n, hub_timeout=60.0)
        self.waiting = [rank for rank in range(n) if rank != late]
        self.clocks = [_C.ManualClock() for _ in range(n)]
        self.reports = [[] for _ in range(n)]

    def engine(self, rank):
        return self.meeting.engine(
            rank,
            [plan("b", ones(), 4)],
            timeout=60.0,
            straggler_after_s=AFTER,
            on_straggler=self.reports[rank].append,
            clock=self.clocks[rank],
        )

    def let_the_others_look(self):
        """Returns when the heartbeats are those of now, and the other ranks have seen them."""
        before = self._beats()
        wait_until(
            lambda: all(new >= old + 2 for new, old in zip(self._beats(), before, strict=True)),
            "two heartbeats",
        )
        looks = [self.clocks[rank].readings for rank in self.waiting]
        wait_until(
            lambda: all(
                self.clocks[rank].readings >= old + 2
                for rank, old in zip(self.waiting, looks, strict=True)
            ),
            "two looks",
        )

    def turn(self, seconds):
        for rank in self.waiting:
            self.clocks[rank].turn(seconds)

    def _beats(self):
        store = self.meeting.store
        keys = [f"beat/{rank}" for rank in range(self.meeting.size)]
        return [int(store.get(key).split()[0]) if store.check([key]) else 0 for key in keys]


def reports_of(n, late, be_slow):
    """Warnings of each rank in its second round, in which rank `late` is slow."""
    ranks = Ranks(n, late)
    stats = [None] * n

    def run(rank):
        engine = ranks.engine(rank)
        run_round(engine)
        if rank == late:
            be_slow(engine, ranks)
        else:
            run_round(engine)
        stats[rank] = engine.stats()

    for error, _ in endings(n, run):
        assert error is None
    return ranks.reports, stats


def let_the_others_wait(ranks):
    """Until each has reported once."""
    ranks.let_the_others_look()
    ranks.turn(AFTER)
    ranks.let_the_others_look()
    assert ranks.reports == [[] for _ in ranks.reports]  # one look accuses nobody
    ranks.turn(BETWEEN_LOOKS)
    wait_until(lambda: all(ranks.reports[rank] for rank in ranks.waiting), "warnings")
    ranks.turn(1.2)


def computes_slowly(engine, ranks):
    engine.begin_round()
    engine.mark_ready(0)
    let_the_others_wait(ranks)
    mark_all(engine)
    engine.wait()


def starts_late(engine, ranks):
    let_the_others_wait(ranks)
    run_round(engine)


@pytest.mark.parametrize(
    ("be_slow", "place"),
    [
        (computes_slowly, "is still in round 2: computing, 1 of 4 tensors are ready"),
        (starts_late, "is 1 round behind, in round 1: between two rounds"),
    ],
)
def test_waiting_ranks_are_warned_of_the_straggler_and_its_delay(be_slow, place):
    start = time.monotonic()
    reports, stats = reports_of(3, 1, be_slow)
    seconds = time.monotonic() - start
    assert reports[1] == []
    for rank in (0, 2):
        first, over = reports[rank]
        me = f"module 'Net', rank {rank} of 3, round 2: "
        assert first.startswith(me + "has waited 11.3 s for its buckets. ")
        assert f"Where the others are: rank 1 {place}" in first
        assert "; rank" not in first  # nobody else is accused
        assert "It goes on waiting until 60 s have passed." in first
        assert over == me + "its buckets came after 12.5 s."
        # Two heartbeats come twice, half a second apart.
        assert 1.5e9 < stats[rank]["longest_wait_ns"] < seconds * 1e9
        assert stats[1]["longest_wait_ns"] < stats[rank]["longest_wait_ns"]


def test_a_short_wait_does_not_warn():
    def be_slow(engine, ranks):
        ranks.turn(AFTER - 0.1)
        ranks.let_the_others_look()
        run_round(engine)

    reports, _ = reports_of(2, 1, be_slow)
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
