"""Whether what came of a case is what must come of it. A verdict is a list of defects; none: good.

The three that must not be: a rank that hangs, ranks that hold different weights and do not know it,
and an error that does not say by whom it came. And: a process that crashes.
"""

import re
from dataclasses import dataclass, field

from faults.cases import GOES_ON, MISMATCH, SPREADS
from support import every_algorithm

HANG, DIVERGENCE, UNNAMED, CRASH = "hang", "silent divergence", "unnamed error", "crash"
UNEXPECTED = "other than expected"
STORE_IS_GONE = "The job's store does not answer"


@dataclass
class RankOutcome:
    """Outcome of one rank. steps: {number: (bits, finite)} of those that it ended."""

    steps: dict = field(default_factory=dict)
    error: str | None = None  # the class of the BaguaError that it raised
    text: str = ""
    done: bool = False
    hangs: bool = False
    crash: str | None = None  # how it ended, if it should not have
    struck: bool = False  # on the victim: the fault has come
    output: str = ""


def verdict(case, outcomes, reference):
    """[(kind, what)] of a case. reference: the outcomes without the fault, or None for its own."""
    defects = []
    for rank, outcome in enumerate(outcomes):
        if outcome.hangs:
            defects.append((HANG, f"rank {rank} hangs: {outcome.output[-6000:]}"))
        if outcome.crash:
            defects.append((CRASH, f"rank {rank} {outcome.crash}: {outcome.output[-3000:]}"))
        defects += [(UNNAMED, what) for what in _unnamed(case, rank, outcome)]
        if not outcome.hangs and not outcome.crash:
            defects += [(UNEXPECTED, what) for what in _unexpected(case, rank, outcome)]
    defects += [(DIVERGENCE, what) for what in _divergences(case, outcomes, reference)]
    return defects


def _is_left_alone(case, rank):
    return case.fault == "none" or rank != case.victim


def _has_seen_the_value(case, outcome):
    """Whether QAdam refused a value that has spread: it would stay in the momentum for ever."""
    refuses = case.outcome == SPREADS and case.algorithm == "qadam"
    return refuses and "is not finite" in outcome.text


def _unnamed(case, rank, outcome):
    if outcome.error is None or not _is_left_alone(case, rank) or case.outcome == GOES_ON:
        return []
    if _has_seen_the_value(case, outcome):
        return []
    others = [case.victim]
    if case.outcome == MISMATCH:  # a mismatch has two sides
        others += [0]
    named = any(re.search(rf"\brank {other}\b", outcome.text) for other in others)
    # Rank 0 has it, and may be the victim, or have ended because of the victim.
    store_died = case.store == "rank 0" and STORE_IS_GONE in outcome.text
    if named or store_died:
        return []
    return [f"rank {rank} raised {outcome.error}: {outcome.text}"]


def _unexpected(case, rank, outcome):
    said = f"{outcome.error}: {outcome.text}" if outcome.error else "no error"
    if case.outcome in (GOES_ON, SPREADS):
        good = outcome.done or _has_seen_the_value(case, outcome)
        return [] if good else [f"rank {rank} did not go on to the end: {said}"]
    if case.outcome == MISMATCH:
        good = outcome.error == "BaguaMismatchError"
        return [] if good else [f"rank {rank} raised no mismatch: {said}"]
    if not _is_left_alone(case, rank):
        return []
    # Asynchronous averaging does not wait: ranks may end before they hear of it. So may
    # those whose training was over when the fault came.
    excused = outcome.done and (case.algorithm == "async" or case.place == "any")
    return [] if outcome.error or excused else [f"rank {rank} raised nothing: {said}"]


def _divergences(case, outcomes, reference):
    if case.algorithm == "async":
        return []
    found = []
    own_weights = case.algorithm in every_algorithm.OWN_WEIGHTS
    steps = sorted({step for outcome in outcomes for step in outcome.steps})
    for step in steps:
        there = {rank: o.steps[step] for rank, o in enumerate(outcomes) if step in o.steps}
        if not own_weights and len({bits for bits, _ in there.values()}) > 1:
            found.append(f"after step {step} ranks hold different bits: {there}")
        spoilt = case.outcome == SPREADS and step >= case.step
        if spoilt and not own_weights and any(finite for _, finite in there.values()):
            found.append(f"after step {step} the bad value is not on every rank: {there}")
        if reference is None or spoilt:
            continue
        for rank, (bits, _) in there.items():
            expected = reference[rank].steps.get(step)
            if expected is None or expected[0] != bits:
                found.append(
                    f"after step {step} rank {rank} does not hold what it would without the fault"
                )
    return found[:3]
