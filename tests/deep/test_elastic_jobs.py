"""Two ranks of an elastic job at once are killed and started again, many times in one job."""

import os
import random

import pytest
from faults.elastic_job import Job

RANKS = 4
TIMES = int(os.environ.get("BAGUA_TEST_DOUBLE_KILLS", "8"))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_two_ranks_killed_at_once_come_back(monkeypatch, transport):
    monkeypatch.setenv("BAGUA_COMM", transport)
    seed = 20261125
    draw = random.Random(seed)
    with Job(size=RANKS) as job:
        job.start_all()
        job.wait_for_members(list(range(RANKS)))
        for time in range(TIMES):
            victims = draw.sample(range(RANKS), 2)
            for victim in victims:
                job.processes[victim].kill()
            for victim in victims:
                job.processes[victim].wait()
            rest = [rank for rank in range(RANKS) if rank not in victims]
            if draw.random() < 0.5:  # else they come back while the others still agree
                job.wait_for_members(rest)
            for victim in victims:
                job.start(victim)
            job.wait_for_members(list(range(RANKS)))
            ends = [job.processes[rank].poll() for rank in rest]
            assert ends == [None, None], f"seed {seed}, time {time}: survivors ended with {ends}"
        losses = job.finish()
        assert len(set(losses)) == 1
        assert job.judge() > TIMES
