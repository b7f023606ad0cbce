"""Compares what a house did in a situation with torch, with the oracle and between ranks."""

import re
from dataclasses import dataclass, field

import torch
from ranks.situations import rows

RELATIVE, ABSOLUTE = 1e-5, 1e-6
#: Relative and absolute, of dtypes whose sums depend on the order of three ranks.
NARROW = {torch.bfloat16: (1.6e-2, 1e-3), torch.float16: (1e-3, 1e-4)}

#: Verdicts that pass a test, beside what a row expects, and those that fail one.
ABSENT = "absent"
DIFFERS, FAILS, STALE = "DIFFERS", "FAILS", "STALE"


@dataclass
class Outcome:
    """Outcome of a situation on one rank.

    kind: done, raised, absent, or gone if a rank hangs or died. text: what was raised, or stacks.
    """

    kind: str
    values: dict = field(default_factory=dict)
    text: str = ""
    warnings: list = field(default_factory=list)


def equal(one, other):
    """Whether two recorded values are the same up to rounding."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(equal(a, b) for a, b in pairs)
    if isinstance(one, (torch.Tensor, float)) and isinstance(other, (torch.Tensor, float)):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        if one.shape != other.shape:
            return False
        tolerances = NARROW.get(one.dtype, (RELATIVE, ABSOLUTE))
        return torch.allclose(one.double(), other.double(), *tolerances, equal_nan=True)
    return type(one) is type(other) and one == other


def same_bits(one, other):
    """Whether two ranks hold the same."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    return one == other


def differences(got, wanted, subset=False):
    """Lines that say which values are not the wanted ones, on which ranks. By rank: dicts."""
    lines = []
    names = dict.fromkeys(name for values in wanted for name in values)
    if not subset:
        names |= dict.fromkeys(name for values in got for name in values)
    missing = "nothing"
    for name in names:
        mine = [values.get(name, missing) for values in got]
        theirs = [values.get(name, missing) for values in wanted]
        if [value is missing for value in mine] != [value is missing for value in theirs]:
            lines.append(f"{name}: recorded on one side only")
            continue
        if not all(map(equal, mine, theirs)):
            lines.append(f"{name}: is {mine}, not {theirs}")
        elif len({type(v) for v in theirs}) == 1:
            agree = all(same_bits(theirs[0], other) for other in theirs[1:])
            if agree and not all(same_bits(mine[0], other) for other in mine[1:]):
                lines.append(f"{name}: ranks differ in bits: {mine}")
    return lines


def values_of(outcomes):
    return [rank.values for rank in outcomes]


def problem(outcomes):
    """The text of outcomes that have no values on some rank, or nothing."""
    return "\n".join(dict.fromkeys(own.text for own in outcomes if own.kind != "done"))


def all_raised(outcomes, pattern):
    """Whether all ranks raised, and one said what is expected."""
    kinds = {rank.kind for rank in outcomes}
    return kinds == {"raised"} and any(re.search(pattern, r.text, re.DOTALL) for r in outcomes)


def wrong_by(oracle, outcomes):
    """The differences from an oracle."""
    wanted = [oracle(rank, len(outcomes)) for rank in range(len(outcomes))]
    return differences(values_of(outcomes), wanted, subset=True)


def judge_torch(row, outcomes):
    """(verdict, text) of torch itself: whether the row says the truth about it."""
    kinds = {expectation.kind for expectation in row.expected.values()}
    trouble = problem(outcomes)
    if rows.RAISES in kinds:
        return (rows.SAME, "") if trouble else (STALE, "torch does not raise")
    oracles = [e.oracle for e in row.expected.values() if e.oracle is not None]
    if oracles:
        wrong = trouble or wrong_by(oracles[0], outcomes)
        return (rows.SAME, "") if wrong else (STALE, "torch gives what the oracle says")
    return (FAILS, trouble) if trouble else (rows.SAME, "")


def judge(row, house, theirs, outcomes):
    """(verdict, text): verdict is what the row expects, or one of those that fail."""
    if house == "torch":
        return judge_torch(row, outcomes)
    expected = row.of(house)
    if all(rank.kind == "absent" for rank in outcomes):
        return ABSENT, ""
    trouble = problem(outcomes)
    if expected.kind in (rows.REFUSED, rows.RAISES):
        if all_raised(outcomes, expected.text):
            return expected.kind, ""
        return DIFFERS, f"is expected to raise '{expected.text}', not: {trouble}"
    if trouble:
        return FAILS, trouble
    texts = [text for rank in outcomes for text in rank.warnings]
    if expected.text and not any(re.search(expected.text, text, re.DOTALL) for text in texts):
        return DIFFERS, f"no warning matches '{expected.text}': {texts}"
    if expected.kind == rows.WARNED:
        return rows.WARNED, ""
    if expected.kind == rows.BETTER:
        wrong = wrong_by(expected.oracle, outcomes)
    elif problem(theirs):
        return STALE, "torch itself has no values: " + problem(theirs)
    else:
        wrong = differences(values_of(outcomes), values_of(theirs))
    return (DIFFERS, "\n".join(wrong)) if wrong else (expected.kind, "")
