"""Compares what a house did in a situation with torch, with the oracle and between ranks."""

import re

import torch
from ranks.situations import rows

ABSOLUTE = 1e-6
#: Relative and absolute, of dtypes whose sums depend on the order of three ranks.
NARROW = {torch.bfloat16: (1.6e-2, 1e-3), torch.float16: (1e-3, 1e-4)}

#: Verdicts that pass a test, and those that fail one.
GOOD = {rows.SAME, rows.BETTER, rows.REFUSED, rows.RAISES, rows.WARNED, rows.ABSENT}
DIFFERS, HANGS, REFUSES, STALE = "DIFFERS", "HANGS", "REFUSES", "STALE"


def equal(one, other, tolerance=1e-5):
    """Whether two recorded values are the same up to rounding."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(equal(a, b, tolerance) for a, b in pairs)
    if isinstance(one, (torch.Tensor, float)) and isinstance(other, (torch.Tensor, float)):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        if one.shape != other.shape:
            return False
        wide = torch.complex128 if one.is_complex() else torch.float64
        tolerances = NARROW.get(one.dtype, (tolerance, ABSOLUTE))
        return torch.allclose(one.to(wide), other.to(wide), *tolerances, equal_nan=True)
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


def shown(value):
    """A value in few characters."""
    if isinstance(value, torch.Tensor):
        flat = value.reshape(-1).tolist()
        flat = [f"{v:.4g}" if isinstance(v, complex) else v for v in flat]
        if flat and all(v == flat[0] for v in flat):
            return shown(flat[0])
        return "[" + ", ".join(map(shown, flat[:8])) + (", …]" if len(flat) > 8 else "]")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(shown, value)) + "]"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def differences(row, got, wanted, subset=False):
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
        if not all(equal(a, b, row.tolerance) for a, b in zip(mine, theirs, strict=True)):
            lines.append(f"{name}: is {list(map(shown, mine))}, not {list(map(shown, theirs))}")
        elif len({type(v) for v in theirs}) == 1:
            agree = all(same_bits(theirs[0], other) for other in theirs[1:])
            if agree and not all(same_bits(mine[0], other) for other in mine[1:]):
                lines.append(f"{name}: ranks differ in bits: {list(map(shown, mine))}")
    return lines


def values_of(outcome):
    return [rank.values for rank in outcome.ranks]


def problem(outcome):
    """(verdict, text) of an outcome that gave no values on some rank, or None."""
    hanging = [r for r, rank in enumerate(outcome.ranks) if rank.kind == "hangs"]
    if hanging:
        stacks = "\n".join(outcome.ranks[r].text[-3000:] for r in hanging)
        others = "\n".join(r.text[-600:] for r in outcome.ranks if r.kind != "hangs" and r.text)
        return HANGS, f"ranks {hanging} hang\n{stacks}\nthe others:\n{others}"
    failed = [r for r, rank in enumerate(outcome.ranks) if rank.kind != "done"]
    if failed:
        texts = [f"rank {r}: {outcome.ranks[r].text[-1500:]}" for r in failed]
        return REFUSES, "\n".join(texts)
    return None


def refusal_matches(outcome, pattern):
    """Whether all ranks raised, and one said what is expected."""
    all_raised = all(rank.kind == "raised" for rank in outcome.ranks)
    return all_raised and any(re.search(pattern, r.error, re.DOTALL) for r in outcome.ranks)


def oracle_values(oracle, size):
    return [oracle(rank, size) for rank in range(size)]


def judge_torch(row, outcome, size):
    """(verdict, text) of torch itself: whether the row says the truth about it."""
    kinds = {expectation.kind for expectation in row.expected.values()}
    trouble = problem(outcome)
    if rows.RAISES in kinds:
        return (
            ("same", "") if trouble and trouble[0] == REFUSES else (STALE, "torch does not raise")
        )
    oracles = [e.oracle for e in row.expected.values() if e.oracle is not None]
    if oracles:
        wrong = trouble or differences(
            row, values_of(outcome), oracle_values(oracles[0], size), subset=True
        )
        return ("same", "") if wrong else (STALE, "torch gives what the oracle says")
    if rows.REFUSED in kinds and not {rows.SAME, rows.WARNED} & kinds and len(kinds) == 1:
        return "same", ""
    if trouble:
        return trouble
    if row.right is not None:
        wrong = differences(row, values_of(outcome), oracle_values(row.right, size), subset=True)
        return (DIFFERS, "\n".join(wrong)) if wrong else ("same", "")
    return "same", ""


def judge(row, house, theirs, outcome, size):
    """(verdict, text): verdict is what the row expects, or one of those that fail."""
    if house == "torch":
        return judge_torch(row, outcome, size)
    expected = row.of(house)
    if expected.kind == rows.ABSENT:
        absent = all(rank.kind == "absent" for rank in outcome.ranks)
        return (rows.ABSENT, "") if absent else (STALE, "it is not absent")
    if expected.kind in (rows.REFUSED, rows.RAISES):
        if refusal_matches(outcome, expected.text):
            return expected.kind, ""
        trouble = problem(outcome)
        if trouble:
            return trouble[0], f"not the expected '{expected.text}'\n{trouble[1]}"
        return DIFFERS, f"is expected to raise '{expected.text}', and gave {values_of(outcome)}"
    trouble = problem(outcome)
    if trouble:
        return trouble
    values = values_of(outcome)
    as_torch = [] if problem(theirs) else differences(row, values, values_of(theirs))
    texts = [text for rank in outcome.ranks for text in rank.warnings]
    if not any(re.search(expected.text, text, re.DOTALL) for text in ["", *texts]):
        missing = f"no warning matches '{expected.text}': {texts}"
        return DIFFERS, "\n".join([missing, *as_torch])
    if expected.kind == rows.WARNED:
        return rows.WARNED, ""
    if expected.kind == rows.BETTER:
        wrong = differences(row, values, oracle_values(expected.oracle, size), subset=True)
    elif problem(theirs):
        return STALE, "torch itself has no values: " + problem(theirs)[1]
    else:
        wrong = as_torch
    return (DIFFERS, "\n".join(wrong)) if wrong else (expected.kind, "")
