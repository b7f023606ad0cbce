"""Trainings in which something goes wrong, by the thousand: hangs, divergences and unnamed errors.

    python benchmarks/soak.py [--faults 1000] [--seed 1] [--only "processes 17"] [--grid]

Half of the faults strike ranks that are processes, which share memory (with `BAGUA_COMM=gloo` they
use gloo), half ranks that are threads. Each is drawn from a seed, which is printed with every
defect; `--only` repeats one. `--grid` takes every fault under every algorithm once, in place of
random ones. Each training is compared, after every step and by the bits of its weights, with the
same one without the fault. Ends with status 1 if there was a defect. The table goes to
build/benchmarks/soak.json, unless `--dry`.
"""

import argparse
import collections
import statistics
import sys
import time
from pathlib import Path

from common import machine, write_results

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import bagua.torch_api  # noqa: F401 - imported once, before ranks are forked
from faults import cases, processes, threads, verdict
from support import every_algorithm

RUNNERS = {"processes": processes.run, "threads": threads.run}
#: By form its faults and its algorithms.
GRID = {
    "processes": (cases.PROCESS_FAULTS, list(every_algorithm.ALGORITHMS)),
    "threads": (cases.THREAD_FAULTS, cases.THREAD_OPERATIONS),
}
KINDS = [
    verdict.HANG,
    verdict.DIVERGENCE,
    verdict.UNNAMED,
    verdict.CRASH,
    verdict.UNEXPECTED,
]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--faults", type=int, default=1000, help="how many, in both forms together")
    parser.add_argument("--form", choices=list(RUNNERS), help="only ranks of this form")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    faults, algorithms = ({*p, *t} for p, t in zip(GRID["processes"], GRID["threads"], strict=True))
    parser.add_argument("--fault", choices=sorted(faults), help="only this one")
    parser.add_argument("--algorithm", choices=sorted(algorithms), help="only this one")
    parser.add_argument("--only", metavar="'FORM SEED'", help="repeat one case")
    parser.add_argument("--grid", action="store_true", help="every fault under every algorithm")
    parser.add_argument("--at-once", type=int, default=4, help="cases at a time")
    parser.add_argument("--dry", action="store_true", help="leave build/benchmarks alone")
    return parser.parse_args()


def chosen(args):
    """By form the cases to run."""
    if args.only:
        form, seed = args.only.rsplit(" ", 1)
        return {form: [cases.draw(form, int(seed), args.fault, args.algorithm)]}
    wanted = (args.fault, args.algorithm)
    forms = [
        form
        for form in ([args.form] if args.form else RUNNERS)
        if all(w is None or w in known for w, known in zip(wanted, GRID[form], strict=True))
    ]
    if not forms:
        raise SystemExit(f"no form of ranks has both fault {args.fault} and {args.algorithm}")
    if args.grid:
        pairs = {form: [(f, a) for f in GRID[form][0] for a in GRID[form][1]] for form in forms}
    else:
        share = -(-args.faults // len(forms))
        pairs = {form: [(args.fault, args.algorithm)] * share for form in forms}
    return {
        form: [cases.draw(form, args.seed + i, *pair) for i, pair in enumerate(pairs[form])]
        for form in forms
    }


class Tally:
    """Outcomes of all cases so far, by form and fault."""

    def __init__(self, total):
        self.total, self.begun = total, time.monotonic()
        self.rows = collections.defaultdict(lambda: {"cases": 0, "struck": 0, "seconds": []})
        self.defects = []
        self.done = 0

    def add(self, case, outcomes, seconds, reference):
        row = self.rows[case.form, case.fault]
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
        yield "| ranks are | fault | cases | struck | seconds to the end: median | longest |"
        yield "|---|---|---|---|---|---|"
        for (form, fault), row in sorted(self.rows.items()):
            seconds = row["seconds"] or [0.0]
            middle, longest = statistics.median(seconds), max(seconds)
            yield (
                f"| {form} | {fault} | {row['cases']} | {row['struck']} | {middle:.1f} | "
                f"{longest:.1f} |"
            )
        total = sum(row["cases"] for row in self.rows.values())
        yield f"\n{total} cases: " + ", ".join(f"{kind} {self.count(kind)}" for kind in KINDS)


def main():
    args = arguments()
    by_form = chosen(args)
    tally = Tally(sum(len(some) for some in by_form.values()))
    for form, some in by_form.items():
        references = {}
        needed = list(dict.fromkeys(case.undisturbed for case in some))
        print(f"{len(needed)} trainings of {form} without a fault", flush=True)
        for case, outcomes, _ in RUNNERS[form](needed, args.at_once):
            references[case] = None if tally.judge(case, outcomes, None) else outcomes
        for case, outcomes, seconds in RUNNERS[form](some, args.at_once):
            tally.add(case, outcomes, seconds, references[case.undisturbed])
    print("\n".join(tally.table()))
    if not args.dry and not args.only:
        result = {
            "machine": machine(),
            "seeds": {form: [some[0].seed, some[-1].seed] for form, some in by_form.items()},
            "minutes": round((time.monotonic() - tally.begun) / 60, 1),
            "faults": [
                {"form": form, "fault": fault, **row} for (form, fault), row in tally.rows.items()
            ],
            "defects": {kind: tally.count(kind) for kind in KINDS},
        }
        write_results("soak", result)
    return 1 if tally.defects else 0


if __name__ == "__main__":
    sys.exit(main())
