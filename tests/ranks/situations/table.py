"""The table of docs/migrating.md: what is as in torch, what is better, what is refused."""

from ranks.situations import rows, themes
from ranks.situations.houses import OURS

AS_TORCH = (rows.SAME, rows.RAISES, rows.ABSENT)
NAMES = {"class": "the class", "with_bagua": "`with_bagua`"}
HEAD = """\
| situations | as torch | better | refused, or after a warning |
|---|---|---|---|"""


def markdown():
    """Markdown of what the rows expect, which the tests hold us to."""
    lines, whole = [HEAD], []
    for theme in themes.THEMES:
        table = themes.table(theme)
        apart = {row.name for row in table for h in OURS if row.of(h).kind not in AS_TORCH}
        about = themes.about(theme).rstrip(".")
        if not apart:
            whole.append((about, len(table)))
            continue
        better, others = _cell(table, {rows.BETTER}), _cell(table, {rows.REFUSED, rows.WARNED})
        as_torch = f"{len(table) - len(apart)} of {len(table)}"
        lines.append(f"| {about} | {as_torch} | {better} | {others} |")
    count = sum(number for _, number in whole)
    abouts = "; ".join(about[0].lower() + about[1:] for about, _ in whole)
    lines.append(f"| The rest: {abouts} | {count} of {count} | | |")
    return "\n".join(lines)


def _cell(table, kinds):
    """The situations of a theme in which a house does one of `kinds`, by reason."""
    found = {}
    for row in table:
        for house in OURS:
            expected = row.of(house)
            if expected.kind in kinds:
                found.setdefault(_reason(expected), {}).setdefault(row.name, []).append(house)
    return "<br>".join(f"{', '.join(map(_told, n.items()))}: {why}" for why, n in found.items())


def _reason(expected):
    if expected.kind == rows.WARNED:
        return f"a warning; {expected.reason}"
    if expected.kind == rows.REFUSED and expected.oracle is None:
        return f"torch is right here; {expected.reason}"
    return expected.reason


def _told(entry):
    name, houses = entry
    only = "" if len(houses) == len(OURS) else f" ({NAMES[houses[0]]})"
    return name.replace("_", " ") + only
