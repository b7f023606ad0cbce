"""Runs situations and prints what came of each.

python tests/ranks/situations/report.py [--theme modes]... [--name part of a name]...
    [--size 2]... [--house torch]... [--values] [--brief] [--markdown]
"""

import argparse
import collections
import pickle
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ranks.situations import judging, processes, themes
from ranks.situations.houses import HOUSES, OURS
from ranks.situations.table import markdown


def collect(names, sizes, houses):
    """Yields ((name of the situation, house, size), (verdict, text, outcome))."""
    table = [row for _, row in themes.all_rows().values()]
    for size in sizes:
        theirs = {}
        for row, house, outcome in processes.Runner(table).run(size, houses, names):
            if house == "torch":
                theirs[row.name] = outcome
            verdict, text = judging.judge(row, house, theirs.get(row.name), outcome, size)
            yield (row.name, house, size), (verdict, text, outcome)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--theme", action="append", choices=themes.THEMES)
    parser.add_argument("--name", action="append", help="part of a situation's name")
    parser.add_argument("--select", type=Path, help="a file with names, one a line")
    parser.add_argument("--size", action="append", type=int)
    parser.add_argument("--house", action="append", choices=list(HOUSES))
    parser.add_argument("--values", action="store_true", help="print what was recorded")
    parser.add_argument("--brief", action="store_true", help="print no texts")
    parser.add_argument("--save", type=Path, help="a file for the verdicts, pickled")
    parser.add_argument("--markdown", action="store_true", help="print the table and end")
    options = parser.parse_args()
    if options.markdown:
        print(markdown())
        return 0
    names = {
        name
        for name, (theme, _) in themes.all_rows().items()
        if theme in (options.theme or themes.THEMES)
        and any(part in name for part in options.name or [""])
    }
    if options.select:
        names = set(options.select.read_text().split())
    houses = [house for house in HOUSES if house in (options.house or HOUSES) or house == "torch"]
    processes.prepare()
    return run(options, names, houses)


def run(options, names, houses):
    """Whether a situation failed."""
    begun = time.monotonic()
    counts, verdicts = collections.Counter(), {}
    for case, (verdict, text, outcome) in collect(names, options.size or [2, 3], houses):
        name, house, size = case
        counts[verdict] += house in OURS
        verdicts[case] = verdict, text
        print(f"{verdict:8} {name}, {house}, {size} ranks, {outcome.seconds:.2f} s", flush=True)
        if options.values:
            show(outcome)
        if not options.brief and text and verdict not in judging.GOOD:
            print("    " + text.replace("\n", "\n    "))
    if options.save:
        options.save.write_bytes(pickle.dumps(verdicts))
    print(f"{len(names)} situations, {time.monotonic() - begun:.0f} s: {dict(counts)}")
    return any(verdict not in judging.GOOD for verdict, _ in verdicts.values())


def show(outcome):
    """What was recorded, once if all ranks hold the same; long values are cut."""
    lines = []
    for own in outcome.ranks:
        if own.kind != "done":
            lines.append(f"{own.kind}: {(own.error or own.text)[:300]}")
            continue
        values = ", ".join(f"{name} {judging.shown(v)}" for name, v in own.values.items())
        told = {f" [warns: {text[:90]}]" for text in own.warnings}
        lines.append(values[:400] + "".join(sorted(told)))
    if len(set(lines)) == 1:
        print(f"    all: {lines[0]}")
    else:
        print("".join(f"    rank {rank}: {line}\n" for rank, line in enumerate(lines)), end="")


if __name__ == "__main__":
    sys.exit(main())
