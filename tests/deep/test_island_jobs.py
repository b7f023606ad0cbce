"""Islands of two ranks of which one is killed. More of them: test_random_faults.py."""

import pytest
from faults.island_job import RANKS, IslandJob


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "place"), [(5, "launch"), (0, "mean")])
def test_two_of_three_islands_finish_when_a_rank_of_one_is_killed(victim, place):
    """Its island's other rank ends by itself, after it has met other islands without it or not."""
    lost = victim // RANKS
    rest = [island for island in range(3) if island != lost]
    with IslandJob(rounds=12, islands=3) as job:
        job.start_all({victim: f"{place}:5"})
        job.finish()
        job.wait_until("all end", lambda: all(p.poll() is not None for p in job.processes.values()))
        assert job.judge() == 12
        for process in job.ranks_of(*rest):
            assert job.made(process) == (12, rest)
            text = job.output(process).read_text()
            assert f"lost island(s) {lost} in outer round " in text, text
            assert f"island(s) {rest[0]}, {rest[1]} go on" in text


@pytest.mark.timeout(120)
def test_an_island_joins_that_was_not_there_at_the_start():
    with IslandJob(islands=1, later=1) as job:
        job.start_island(0)
        job.wait_for_islands(0)
        job.start_island(1)
        job.wait_for_islands(0, 1)
        job.finish()
        assert job.judge() > 30
        assert "island(s) 1 came back before outer round" in job.output(0).read_text()
