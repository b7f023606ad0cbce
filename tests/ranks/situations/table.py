"""The table of situations, by theme, and as README.md shows it."""

import importlib
import inspect

from ranks.situations import rows
from ranks.situations.houses import OURS

THEMES = (
    "rounds",
    "gradients",
    "hooks",
    "several_models",
    "buffers",
    "freezing",
    "inside_forward",
    "parameters",
    "wrapping",
    "changes",
    "communicating",
    "copies",
    "joining",
    "recipes",
    "checkpointing",
)
AS_TORCH = (rows.SAME, rows.RAISES)
NAMES = {"class": "the class", "with_bagua": "with_bagua"}
KINDS = ({rows.BETTER}, {rows.REFUSED, rows.WARNED})


def _theme(name):
    return importlib.import_module(f"ranks.situations.{name}")


def table(theme):
    """A row of each function of a theme whose arguments are wrap, rank and size."""
    module = _theme(theme)
    exceptions = {row.run: row for row in getattr(module, "EXCEPTIONS", [])}
    return [
        exceptions.get(function, rows.Row(function))
        for function in vars(module).values()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and list(inspect.signature(function).parameters) == ["wrap", "rank", "size"]
    ]


def markdown():
    """Markdown of the expectations in the rows, which the tests compare with the results."""
    lines = [
        "| situations | as torch | better here | refused or warned about |",
        "|---|---:|---|---|",
    ]
    for theme in THEMES:
        found = table(theme)
        apart = {row.name for row in found for h in OURS if row.of(h).kind not in AS_TORCH}
        reasons = ["; ".join(map(_counted, _by_reason(found, kinds).items())) for kinds in KINDS]
        count = f"{len(found) - len(apart)} of {len(found)}"
        about = _theme(theme).__doc__.strip().rstrip(".")
        lines.append(f"| {about} | {count} | {' | '.join(reasons)} |")
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
