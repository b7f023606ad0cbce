"""Rounds of one part of the plan, on thread ranks."""

import pytest
import torch
from support.threads.engine_ranks import Meeting, plan
from support.threads.thread_ranks import run_thread_ranks


def buckets(values):
    return [
        plan(str(i), flat, part=part)
        for i, (flat, part) in enumerate(zip(values, (0, 1, 0, 1), strict=True))
    ]


@pytest.mark.parametrize("lanes", [1, 2, 3], ids=lambda lanes: f"{lanes}-lanes")
@pytest.mark.parametrize("n", [1, 3], ids=lambda n: f"{n}-ranks")
def test_only_buckets_of_the_part_are_averaged(n, lanes):
    meeting = Meeting(n, lanes=lanes)

    def run(comm):
        flats = [torch.full((10,), float(comm.rank + i)) for i in range(4)]
        engine = meeting.engine(comm.rank, buckets(flats))
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
