"""Elastic jobs whose ranks are killed. More places and times: tests/deep/test_elastic_jobs.py."""

import signal

import pytest
from faults import elastic_job
from faults.elastic_job import Job
from faults.elastic_rank import EXIT_OF_AN_ERROR


def finish_without(victim, place):
    """Three ranks train, one is killed in its sixth round, at the place; the others end as two."""
    with Job(rounds=12) as job:
        job.start_all({victim: f"{place}:5"})
        job.finish()
        assert job.processes[victim].wait() == -signal.SIGKILL
        assert job.judge() == 12
        rest = [rank for rank in range(3) if rank != victim]
        for rank in rest:
            assert job.made(rank) == (12, rest)
            text = job.output(rank).read_text()
            lost = f"lost rank(s) {victim} in outer round "
            assert text.count(lost) == 1, text
            # In its sixth round; killed with the result in its hands, the others may have it too.
            assert f"{lost}6," in text or (place == "mean" and f"{lost}7," in text), text
            assert f"rank(s) {', '.join(map(str, rest))} go on" in text


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "place"), [(0, "launch"), (1, "between")])
def test_two_of_three_finish_when_one_is_killed(victim, place):
    finish_without(victim, place)


@pytest.mark.timeout(120)
def test_fewer_than_the_quorum_raise():
    with Job(rounds=12, size=2) as job:
        job.start_all({1: "between:5"})
        assert job.processes[0].wait(elastic_job.PATIENCE) == EXIT_OF_AN_ERROR
        text = job.output(0).read_text()
        assert "rank(s) 1 of 2 were lost, and the 1 left are fewer than quorum=2" in text


@pytest.mark.timeout(120)
def test_all_may_start_again_when_none_is_left():
    with Job() as job:
        job.start_all()
        job.wait_for_members([0, 1, 2])
        for process in job.processes.values():
            process.kill()
            process.wait()
        job.start_all()
        job.wait_for_members([0, 1, 2])
        assert [note["begins"] for note in job.notes(0) if "begins" in note] == [0, 0]
        job.finish()
