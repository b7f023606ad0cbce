"""The judge of situations finds what it is there to find."""

import torch
from ranks.situations import judging, rows
from ranks.situations.judging import Outcome
from ranks.situations.rows import better, refused, row, same, warned


def situation(wrap, rank, size):
    raise AssertionError("is not run")


def done(*values, warnings=()):
    """Outcomes that recorded one value on each rank."""
    return [Outcome("done", {"value": v}, warnings=list(warnings)) for v in values]


def raised(*texts):
    """Outcomes of errors; an empty text is a rank that went on."""
    return [Outcome("raised" if text else "done", {"value": 1.0}, text) for text in texts]


def verdict(outcomes, torchs=None, **expected):
    return judging.judge(row(situation, **expected), "class", torchs or outcomes, outcomes)[0]


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
    stale = judging.judge(row(situation, klass=right), "torch", None, done(1.5, 1.5))
    assert stale[0] == judging.STALE


def test_a_refusal_is_one_on_every_rank_and_says_what_is_expected():
    wanted = refused("wrap again", "a reason")
    assert verdict(raised("Error: wrap again", "Error: other"), klass=wanted) == rows.REFUSED
    for other in (raised("Error: wrap again", ""), raised("Error: no", "Error: no")):
        assert verdict(other, klass=wanted) == judging.DIFFERS
    assert verdict(done(1.0, 1.0), klass=wanted) == judging.DIFFERS
    assert verdict(raised("Error: wrap again", "")) == judging.FAILS
    assert verdict([Outcome("gone", text="rank 0 hangs")]) == judging.FAILS


def test_a_warning_that_is_expected_must_come():
    told = done(1.0, 2.0, warnings=["this is a copy"])
    apart = warned("a copy", "a reason")
    assert verdict(told, done(1.5, 1.5), klass=apart) == rows.WARNED
    assert verdict(done(1.0, 2.0), done(1.5, 1.5), klass=apart) == judging.DIFFERS
    assert verdict(told, done(1.0, 2.0), klass=same("a copy")) == rows.SAME
    assert verdict(done(1.0, 2.0), klass=same("a copy")) == judging.DIFFERS
