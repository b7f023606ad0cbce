"""Trainings in which something goes wrong, by the thousand: hangs, divergences and unnamed errors.

    python benchmarks/soak.py [--faults 600] [--seed 1] [--only 17] [--grid]

Ranks are processes, which share memory (with `BAGUA_COMM=gloo` they use gloo). Each fault is drawn
from a seed, which is printed with every defect; `--only` repeats one. `--grid` takes every fault
under every algorithm once, in place of random ones. Each training is compared, after every step and
by the bits of its weights, with the same one without the fault. Ends with status 1 if there was a
defect. The table goes to build/benchmarks/soak.json, unless `--dry`.
"""

import argparse
import collections
import itertools
import statistics
import sys
import time
from pathlib import Path

from common import machine, write_results

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import bagua.torch_api  # noqa: F401 - imported once, before ranks are forked
from faults import cases, processes, verdict
from support import every_algorithm

KINDS = [
    verdict.HANG,
    verdict.DIVERGENCE,
    verdict.UNNAMED,
    verdict.CRASH,
    verdict.UNEXPECTED,
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--faults", type=int, default=600, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--fault", choices=sorted(cases.FAULTS), help="only this one")
    known = sorted(every_algorithm.ALGORITHMS)
    parser.add_argument("--algorithm", choices=known, help="only this one")
    parser.add_argument("--only", type=int, metavar="SEED", help="repeat one case")
    parser.add_argument("--grid", action="store_true", help="every fault under every algorithm")
    parser.add_argument("--at-once", type=int, default=4, help="cases at a time")
    parser.add_argument("--dry", action="store_true", help="leave build/benchmarks alone")
    return parser.parse_args()


def chosen(args):
    """The cases to run."""
    if args.only is not None:
        return [cases.draw(args.only, args.fault, args.algorithm)]
    if args.grid:
        pairs = itertools.product(cases.FAULTS, every_algorithm.ALGORITHMS)
    else:
        pairs = [(args.fault, args.algorithm)] * args.faults
    return [cases.draw(args.seed + i, *pair) for i, pair in enumerate(pairs)]


class Tally:
    """Outcomes of all cases so far, by fault."""

    def __init__(self, total):
        self.total, self.begun = total, time.monotonic()
        self.rows = collections.defaultdict(lambda: {"cases": 0, "struck": 0, "seconds": []})
        self.defects = []
        self.done = 0

    def add(self, case, outcomes, seconds, reference):
        row = self.rows[case.fault]
        row["cases"] += 1
        wrapped = case.place == "wrap"
        row["struck"] += wrapped or any(outcome.struck for outcome in outcomes)
        if seconds is not None:
            row["seconds"].append(seconds)
        self.judge(case, outcomes, reference)
        self.done += 1
        if self.done % 20 == 0 or self.done == self.total:
            elapsed = time.monotonic() - self.begun
            print(
                f"{self.done} of {self.total} cases, {len(self.defects)} defects, {elapsed:.0f} s",
                flush=True,
            )

    def judge(self, case, outcomes, reference):
        """The defects of a case, which are printed."""
        found = verdict.verdict(case, outcomes, reference)
        for kind, what in found:
            self.defects.append({"kind": kind, "case": str(case), "what": what})
            print(f"\n{kind}: {case}\n  {what}\n", flush=True)
        return found

    def count(self, kind):
        return sum(defect["kind"] == kind for defect in self.defects)

    def table(self):
        yield "| fault | cases | struck | seconds to the end: median | longest |"
        yield "|---|---|---|---|---|"
        for fault, row in sorted(self.rows.items()):
            seconds = row["seconds"] or [0.0]
            middle, longest = statistics.median(seconds), max(seconds)
            yield f"| {fault} | {row['cases']} | {row['struck']} | {middle:.1f} | {longest:.1f} |"
        total = sum(row["cases"] for row in self.rows.values())
        yield f"\n{total} cases: " + ", ".join(f"{kind} {self.count(kind)}" for kind in KINDS)


def main():
    args = arguments()
    some = chosen(args)
    tally = Tally(len(some))
    references = {}
    needed = list(dict.fromkeys(case.undisturbed for case in some))
    print(f"{len(needed)} trainings without a fault", flush=True)
    for case, outcomes, _ in processes.run(needed, args.at_once):
        references[case] = None if tally.judge(case, outcomes, None) else outcomes
    for case, outcomes, seconds in processes.run(some, args.at_once):
        tally.add(case, outcomes, seconds, references[case.undisturbed])
    print("\n".join(tally.table()))
    if not args.dry and args.only is None:
        result = {
            "machine": machine(),
            "seeds": [some[0].seed, some[-1].seed],
            "minutes": round((time.monotonic() - tally.begun) / 60, 1),
            "faults": [{"fault": fault, **row} for fault, row in tally.rows.items()],
            "defects": {kind: tally.count(kind) for kind in KINDS},
        }
        write_results("soak", result)
    return 1 if tally.defects else 0


if __name__ == "__main__":
    sys.exit(main())
