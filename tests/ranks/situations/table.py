"""The table of README.md: situations as in torch, better than torch, and refused."""

from ranks.situations import rows, themes
from ranks.situations.houses import OURS

AS_TORCH = (rows.SAME, rows.RAISES, rows.ABSENT)
NAMES = {"class": "the class", "with_bagua": "with_bagua"}
KINDS = ({rows.BETTER}, {rows.REFUSED, rows.WARNED})


def markdown():
    """Markdown of the expectations in the rows, which the tests compare with the results."""
    lines = [
        "| situations | as torch | better here | refused or warned about |",
        "|---|---:|---|---|",
    ]
    whole = []
    for theme in themes.THEMES:
        table = themes.table(theme)
        apart = {row.name for row in table for h in OURS if row.of(h).kind not in AS_TORCH}
        about = themes.about(theme).rstrip(".")
        if not apart:
            whole.append((about, len(table)))
            continue
        reasons = ["; ".join(map(_counted, _by_reason(table, kinds).items())) for kinds in KINDS]
        count = f"{len(table) - len(apart)} of {len(table)}"
        lines.append(f"| {about} | {count} | {' | '.join(reasons)} |")
    count = sum(number for _, number in whole)
    lines.append(f"| everything else, in {len(whole)} themes | {count} of {count} | | |")
    return "\n".join(lines)


def _by_reason(table, kinds):
    """The situations of a theme in which an implementation does one of `kinds`, by reason."""
    found = {}
    for row in table:
        for house in OURS:
            expected = row.of(house)
            if expected.kind in kinds:
                found.setdefault(_reason(expected), {}).setdefault(row.name, []).append(house)
    return found


def _reason(expected):
    if expected.kind == rows.WARNED:
        return f"a warning; {expected.reason}"
    if expected.kind == rows.REFUSED and expected.oracle is None:
        return f"torch is right here; {expected.reason}"
    return expected.reason


def _counted(entry):
    """A reason, and in how many situations it holds, of which implementation if of one only."""
    reason, found = entry
    houses = {house for houses in found.values() for house in houses}
    only = f", {NAMES[houses.pop()]}" if len(houses) == 1 else ""
    return f"{reason} ({len(found)}{only})"
