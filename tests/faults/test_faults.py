"""The judge of random faults. The faults: tests/deep/test_random_faults.py, and `make soak`."""

from dataclasses import replace

from faults import cases, verdict
from faults.verdict import RankOutcome


def case_of(fault):
    drawn = cases.draw(1, fault, "bytegrad")
    return replace(drawn, ranks=3, victim=1, step=3, store="agent", place="between")


STEPS = {step: (f"bits of {step}", True) for step in range(3)}
NAMES = "rank 1 was killed, stopped or cut off"


def told(text=NAMES, kind="BaguaError"):
    return RankOutcome(steps=dict(STEPS), error=kind, text=text)


def good():
    return [told(), RankOutcome(steps=dict(STEPS), struck=True), told()]


REFERENCE = [RankOutcome(steps=STEPS | {3: ("bits of 3", True)}, done=True) for _ in range(3)]


def kinds(case, outcomes, reference=REFERENCE):
    return [kind for kind, _ in verdict.verdict(case, outcomes, reference)]


def test_a_good_end_is_none_of_the_defects():
    assert kinds(case_of("kill"), good()) == []


def test_each_defect_is_found():
    kill = case_of("kill")
    assert kinds(kill, [RankOutcome(hangs=True), *good()[1:]]) == [verdict.HANG]
    assert kinds(kill, [*good()[:2], replace(told(), crash="ended with -6")]) == [verdict.CRASH]
    assert kinds(kill, [*good()[:2], RankOutcome(done=True)]) == [verdict.UNEXPECTED]
    for text in ("connection closed by peer", "rank 0 of 3: timed out", "rank 11 was killed"):
        assert kinds(kill, [told(text), *good()[1:]]) == [verdict.UNNAMED]


def test_other_bits_than_those_of_the_other_ranks_or_of_the_undisturbed_run_are_found():
    other = RankOutcome(steps=STEPS | {2: ("other bits", True)}, error="BaguaError", text=NAMES)
    found = kinds(case_of("kill"), [*good()[:2], other])
    assert found == [verdict.DIVERGENCE] * 2  # from the ranks, and from the reference
    all_wrong = [replace(outcome, steps={0: ("wrong", True)}) for outcome in good()]
    assert kinds(case_of("kill"), all_wrong) == [verdict.DIVERGENCE] * 3
    assert kinds(case_of("kill"), all_wrong, reference=None) == []


def test_training_that_must_continue_may_not_end_with_an_error():
    done = [RankOutcome(steps=dict(STEPS), done=True) for _ in range(3)]
    assert kinds(case_of("slow"), done) == []
    assert kinds(case_of("slow"), [*done[:2], told()]) == [verdict.UNEXPECTED]


def test_a_bad_value_must_reach_all_ranks():
    steps = STEPS | {3: ("bad", False)}
    spoilt = [RankOutcome(steps=dict(steps), done=True) for _ in range(3)]
    assert kinds(case_of("nan"), spoilt) == []
    spoilt[2].steps[3] = ("fine", True)
    assert kinds(case_of("nan"), spoilt) == [verdict.DIVERGENCE] * 2


def test_a_mismatch_must_reach_all_ranks():
    differ = "ranks differ in the model. First difference: rank 0 has [a], rank 1 has [b]"
    told_so = [told(differ, "BaguaMismatchError") for _ in range(3)]
    assert kinds(case_of("other shape"), told_so) == []
    told_so[2] = told(differ, "BaguaError")
    assert kinds(case_of("other shape"), told_so) == [verdict.UNEXPECTED]


def test_a_seed_gives_the_same_case_and_seeds_give_all_faults():
    drawn = [cases.draw(seed) for seed in range(400)]
    assert drawn == [cases.draw(seed) for seed in range(400)]
    assert {case.fault for case in drawn} == set(cases.FAULTS) - {"none"}
    assert all(case.place in cases.FAULTS[case.fault][1] for case in drawn)


def test_qadam_alone_may_refuse_a_bad_value_that_has_spread():
    spread = case_of("nan")
    in_momentum = replace(spread, algorithm="qadam")
    refused = told("the averaged momentum of '0.bias' is not finite")
    assert kinds(in_momentum, [refused] * 3) == []
    assert verdict.UNEXPECTED in kinds(in_momentum, [refused, refused, told()])
    assert verdict.UNEXPECTED in kinds(spread, [refused] * 3)
