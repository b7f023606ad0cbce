"""The judge and the runner of situations find what they are there to find."""

import pickle
import subprocess
import sys
from pathlib import Path

import torch
from ranks.situations import judging, rows
from ranks.situations.processes import Outcome, RankOutcome
from ranks.situations.rows import better, refused, row, same, warned


def situation(wrap, rank, size):
    raise AssertionError("is not run")


def done(*values, warnings=()):
    """An outcome that recorded one value on each rank."""
    return Outcome([RankOutcome("done", {"value": v}, warnings=list(warnings)) for v in values])


def raised(*texts):
    """An outcome of errors; an empty text is a rank that went on."""
    return Outcome([RankOutcome("raised" if t else "done", {"value": 1.0}, t, t) for t in texts])


def verdict(outcome, torchs=None, **expected):
    return judging.judge(row(situation, **expected), "class", torchs or outcome, outcome, 2)[0]


def test_equal_values_are_the_same_up_to_rounding():
    assert verdict(done(1.0, 1.0 + 1e-7), done(1.0, 1.0 + 1e-7)) == rows.SAME
    assert verdict(done(1.0, 2.0), done(1.0, 2.0)) == rows.SAME


def test_another_value_differs():
    assert verdict(done(1.0, 1.0), done(1.0, 1.001)) == judging.DIFFERS
    assert verdict(done(None, None), done(0.0, 0.0)) == judging.DIFFERS
    assert verdict(done(torch.ones(2), torch.ones(2)), done(1.0, 1.0)) == judging.DIFFERS
    assert verdict(done(float("nan")), done(1.0)) == judging.DIFFERS


def test_ranks_that_agree_in_torch_agree_in_bits():
    assert verdict(done(1.0, 1.0 + 1e-9), done(1.0, 1.0)) == judging.DIFFERS
    nan = torch.tensor([float("nan")])
    assert verdict(done(nan, nan), done(nan, nan)) == rows.SAME


def test_an_oracle_replaces_torch():
    right = better(lambda rank, size: {"value": 1.5}, "torch is wrong")
    assert verdict(done(1.5, 1.5), done(1.0, 2.0), klass=right) == rows.BETTER
    assert verdict(done(1.0, 2.0), done(1.0, 2.0), klass=right) == judging.DIFFERS
    stale = judging.judge(row(situation, klass=right), "torch", None, done(1.5, 1.5), 2)
    assert stale[0] == judging.STALE


def test_a_refusal_is_one_on_every_rank_and_says_what_is_expected():
    wanted = refused("wrap again", "a reason")
    assert verdict(raised("Error: wrap again", "Error: other"), klass=wanted) == rows.REFUSED
    assert verdict(raised("Error: wrap again", ""), klass=wanted) == judging.REFUSES
    assert verdict(raised("Error: no", "Error: no"), klass=wanted) == judging.REFUSES
    assert verdict(done(1.0, 1.0), klass=wanted) == judging.DIFFERS


def test_a_warning_that_is_expected_must_come():
    told = done(1.0, 2.0, warnings=["this is a copy"])
    apart = warned("a copy", "a reason")
    assert verdict(told, done(1.5, 1.5), klass=apart) == rows.WARNED
    assert verdict(done(1.0, 2.0), done(1.5, 1.5), klass=apart) == judging.DIFFERS
    assert verdict(told, done(1.0, 2.0), klass=same("a copy")) == rows.SAME
    assert verdict(done(1.0, 2.0), klass=same("a copy")) == judging.DIFFERS


SCRIPT = """
import pickle, sys, time
from ranks.situations import processes
from ranks.situations.rows import row

def waits(wrap, rank, size):
    time.sleep(1000 if rank == 1 else 0)
    return {}

def works(wrap, rank, size):
    return {"rank": float(rank)}

def dies(wrap, rank, size):
    import os
    os._exit(3) if rank == 0 else None
    return {}

table = [row(waits, limit=4.0), row(works), row(dies)]
names = {"waits", "works", "dies"}
found = [
    (entry.name, [rank.kind for rank in outcome.ranks], outcome.ranks[1].text)
    for entry, _, outcome in processes.Runner(table).run(2, ["torch"], names)
]
pickle.dump(found, open(sys.argv[1], "wb"))
"""


def test_a_rank_that_hangs_is_reported_with_its_stack_and_the_rest_goes_on(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "found")]
    tests = str(Path(__file__).parents[2])
    subprocess.run(command, check=True, cwd=tests, capture_output=True)
    (first, kinds, stack), (_, second, _), (_, third, _) = pickle.loads(
        (tmp_path / "found").read_bytes()
    )
    assert first == "waits"
    assert kinds == ["done", "hangs"]
    assert "in waits" in stack
    assert second == ["done", "done"]
    assert third == ["died", "done"]
