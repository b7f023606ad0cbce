"""Elastic jobs: ranks killed, one or two at once, and started again; a link cut for good."""

import itertools
import json
import os
import random
import signal
import time

import pytest
from faults import elastic_job
from faults.elastic_job import Job
from faults.elastic_rank import EXIT_OF_AN_ERROR, INTERVAL, TIMEOUT
from support.processes.networks import needs_namespaces, network
from support.processes.pool import run_on_network

RANKS = 4
TIMES = int(os.environ.get("BAGUA_TEST_DOUBLE_KILLS", "4"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "place"), [(0, "launch"), (1, "between"), (0, "mean")])
def test_two_of_three_finish_wherever_one_is_killed(victim, place):
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


@pytest.mark.timeout(1200)
def test_two_ranks_killed_at_once_come_back():
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
        job.finish()
        assert job.judge() > TIMES


SLOW = 8.0  # seconds that the last rank needs for an interval; the others a tenth of one


class JobWithASlowRank(Job):
    def environment(self, rank):
        seconds = SLOW / INTERVAL if rank == elastic_job.RANKS - 1 else 0.1 / INTERVAL
        return super().environment(rank) | {"GRACE": "1.0", "SECONDS": str(seconds)}


@pytest.mark.timeout(300)
def test_a_slow_rank_costs_no_more_than_the_grace_and_what_it_trains_counts():
    with JobWithASlowRank() as job:
        job.start_all()
        job.wait_until(
            "the slow rank takes part",
            lambda: len([note for note in job.notes(2) if "round" in note]) >= 2,
            2 * elastic_job.PATIENCE,
        )
        notes = [note for note in job.notes(0) if "round" in note]
        job.judge()
    gaps = [late["at"] - early["at"] for early, late in itertools.pairwise(notes)]
    assert max(gaps) < SLOW / 2, gaps
    assert [0, 1, 2] in [note["members"] for note in notes]


@pytest.mark.timeout(300)
def cut_while_training(folder, cuts):
    """How three ranks end that lose those links in their fifth round; the first two go on."""
    rounds, after = 60, 5

    def notes(rank):
        path = folder / f"{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def cut(_):
        deadline = time.monotonic() + elastic_job.PATIENCE
        while not (folder / "2.jsonl").exists() or notes(2)[-1].get("round", 0) < after:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for pair in cuts:
            link.cut(*pair)

    with network.Network(3) as link:
        ends = run_on_network(
            link, Job.program, [folder, rounds], timeout=6 * TIMEOUT, meanwhile=cut
        )
    assert [end.returncode for end in ends] == [0, 0, EXIT_OF_AN_ERROR], ends
    last = [notes(rank)[-2] for rank in range(2)]
    assert last[0]["members"] == [0, 1]
    assert [note["round"] for note in last] == [rounds] * 2
    assert last[0]["bits"] == last[1]["bits"]
    return ends


@needs_namespaces
def test_a_rank_behind_a_cut_link_ends_and_the_others_go_on(tmp_path):
    ends = cut_while_training(tmp_path, [(2, 0), (2, 1)])
    assert "store" in ends[2].stdout


@needs_namespaces
def test_of_two_ranks_that_lose_the_link_between_them_one_goes_on(tmp_path):
    ends = cut_while_training(tmp_path, [(1, 2)])
    assert "rank 2 is left out, and rank(s) 0, 1 go on: ranks 1 and 2 do not" in ends[2].stdout
    for end in ends[:2]:
        assert "go on: ranks 1 and 2 do not reach each other: " in end.stderr
