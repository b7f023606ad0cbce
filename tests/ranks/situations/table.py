"""The list of docs/migrating.md: situations as in torch, better than torch, and refused."""

import textwrap

from ranks.situations import rows, themes
from ranks.situations.houses import OURS

AS_TORCH = (rows.SAME, rows.RAISES, rows.ABSENT)
NAMES = {"class": "the class", "with_bagua": "with_bagua"}
COLUMNS = 120
KINDS = {"Better here": {rows.BETTER}, "Refused or warned about": {rows.REFUSED, rows.WARNED}}


def markdown():
    """Markdown of the expectations in the rows, which the tests compare with the results."""
    lines, whole = [], []
    for theme in themes.THEMES:
        table = themes.table(theme)
        apart = {row.name for row in table for h in OURS if row.of(h).kind not in AS_TORCH}
        about = themes.about(theme).rstrip(".")
        if not apart:
            whole.append((about, len(table)))
            continue
        lines += _item("- ", f"**{about}**: {len(table) - len(apart)} of {len(table)} as in torch.")
        for title, kinds in KINDS.items():
            for reason, names in _by_reason(table, kinds).items():
                where = ", ".join(map(_named, names.items()))
                lines += _item("  - ", f"{title}: {reason}. In {where}.")
    count = sum(number for _, number in whole)
    abouts = "; ".join(about[0].lower() + about[1:] for about, _ in whole)
    lines += _item("- ", f"**Everything else**: {count} of {count} as in torch. ({abouts})")
    return "\n".join(lines)


def _item(bullet, text):
    indent = " " * len(bullet)
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=bullet,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


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


def _named(entry):
    name, houses = entry
    only = "" if len(houses) == len(OURS) else f" ({NAMES[houses[0]]})"
    return f"`{name}`{only}"
