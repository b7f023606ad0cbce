"""The page docs/curves.md, from the results of curves.py."""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curve_runs import warm_up_of
from curve_tasks import TASKS

RANKS = (2, 4)
HEAD = """# Curves

Every algorithm on three tasks of real data, with 2 and 4 ranks, each of which trains on its own
share. Loss and accuracy are those of the anchor where an algorithm has one, else of the mean of the
ranks' weights, on held-out data.
`make curves` makes all of it anew in about six hours on 2 cores, and writes this page to
build/benchmarks/curves.md; runs that are kept in build/benchmarks/curves.json are not made again.

- **Loss**: at the end, mean and 95 % interval over the seeds; their number where some are missing.
  **Above exact**: mean difference from exact gradients, seed by seed. **Within noise**: yes where
  the 95 % interval of these differences holds 0, and their mean is no larger than the interval of
  exact gradients over their seeds. Unclear where only the former is so: seeds are too far apart.
- Outer rounds of `diloco` have rates of (0.7, 0.5) where no others are named, local SGD's (1, 0).
- `qadam` warms up for 40 steps.
- **Sent**: by rank 0 in the whole run.
"""
SOONER = """\
- **Sooner**: how many times sooner than exact gradients of the same seeds it had the loss with
  which those ended, within noise: plus half of the 95 % interval over the seeds of exact gradients.
  Steps of a warm-up count as exact ones.
  Steps were timed on that network, in namespaces, the median of up to 100, or of 6 outer rounds;
  those of a few milliseconds differ by a third from run to run. A dash: it never had that loss.
"""


def interval(values: list[float]) -> float:
    """Half of the 95 % interval of the mean; not a number for a single value, or with such."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    from scipy.stats import t

    return t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def sorted_by_place(runs: dict[str, Any]) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """(task, ranks) -> arm -> {"seeds": {seed: curve}, "seconds": {rate: seconds}}."""
    found: dict[Any, Any] = defaultdict(lambda: defaultdict(lambda: {"seeds": {}, "seconds": {}}))
    for key, result in runs.items():
        task, arm, ranks, place = key.split(" | ")
        kind, number = place.split()
        of = found[task, int(ranks.split()[0])][arm]
        if kind == "seed":
            of["seeds"][int(number)] = result
        else:
            of["seconds"][kind] = result
    return found


def steps_until(curves: list[dict[str, Any]], loss: float) -> float:
    """Steps until the mean of the curves has that loss, between two measurements in proportion."""
    losses = [statistics.mean(values) for values in zip(*(c["loss"] for c in curves), strict=True)]
    steps = curves[0]["step"]
    for i, value in enumerate(losses):
        if value <= loss:
            if i == 0:
                return steps[0]
            share = (losses[i - 1] - loss) / (losses[i - 1] - value)
            return steps[i - 1] + share * (steps[i] - steps[i - 1])
    return math.inf


def seconds_of(steps: float, a_step: float, of_exact: float, warm_up: int) -> float:
    """Seconds of the first ``steps``, of which those of the warm-up are exact ones."""
    return min(steps, warm_up) * of_exact + max(0, steps - warm_up) * a_step


def sooner(arm: dict[str, Any], exact: dict[str, Any], rate: str, warm_up: int) -> float:
    """Time of exact gradients until their last loss, within noise, over that of the arm; or NaN.

    Args:
        warm_up: steps of the arm with exact gradients.
    """
    both = sorted(arm["seeds"].keys() & exact["seeds"].keys())
    if not both or rate not in arm["seconds"] or rate not in exact["seconds"]:
        return math.nan
    noise = interval([curve["loss"][-1] for curve in exact["seeds"].values()])
    last = statistics.mean(exact["seeds"][seed]["loss"][-1] for seed in both)
    goal = last + (0.0 if math.isnan(noise) else noise)
    own, of_exact = (
        steps_until([one["seeds"][seed] for seed in both], goal) for one in (arm, exact)
    )
    if math.isinf(own):
        return math.nan
    of_exact_step = exact["seconds"][rate]
    own_seconds = seconds_of(own, arm["seconds"][rate], of_exact_step, warm_up)
    return of_exact * of_exact_step / own_seconds


def above(arm: dict[int, Any], exact: dict[int, Any]) -> list[float]:
    """Differences of the last losses, of the seeds that both have."""
    both = sorted(arm.keys() & exact.keys())
    return [arm[seed]["loss"][-1] - exact[seed]["loss"][-1] for seed in both]


def verdict(arm: dict[int, Any], exact: dict[int, Any]) -> str:
    differences = above(arm, exact)
    if not differences:
        return ""
    mean, half = statistics.mean(differences), interval(differences)
    if math.isnan(mean):
        return "worse"
    if math.isnan(half):
        return "one seed"
    if abs(mean) > half:
        return "worse" if mean > 0 else "better"
    noise = interval([curve["loss"][-1] for curve in exact.values()])
    return "yes" if abs(mean) <= noise else "unclear"


def no_number(values: list[float]) -> int:
    """How many are not finite: of runs whose weights have become so."""
    return sum(not math.isfinite(value) for value in values)


def counted_seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def table(arms: dict[str, dict[str, Any]]) -> str:
    rates = sorted(
        {rate for arm in arms.values() for rate in arm["seconds"]}, key=int, reverse=True
    )
    head = ["algorithm", "loss", "above exact", "within noise", "accuracy", "sent, MB"]
    head += [f"sooner at {rate} Mb/s" for rate in rates]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    exact = arms["exact"]
    for name, arm in arms.items():
        curves = list(arm["seeds"].values())
        losses = [c["loss"][-1] for c in curves]
        half = interval(losses)
        cells = [name, "" if no_number(losses) else f"{statistics.mean(losses):.3f}"]
        cells[-1] += "" if math.isnan(half) else f" ± {half:.3f}"
        if no_number(losses):
            cells[-1] += f"no number with {no_number(losses)} of {counted_seeds(len(losses))}"
        elif len(curves) < len(exact["seeds"]):
            cells[-1] += f", {counted_seeds(len(curves))}"
        if name == "exact":
            cells += ["", ""]
        else:
            differences = above(arm["seeds"], exact["seeds"])
            known = differences and not no_number(differences)
            cells.append(f"{statistics.mean(differences):+.3f}" if known else "")
            cells.append(verdict(arm["seeds"], exact["seeds"]))
        cells.append(f"{statistics.mean(c['accuracy'][-1] for c in curves):.1%}")
        cells.append(f"{statistics.mean(c['bytes'][-1] for c in curves) / 1e6:.2f}")
        for rate in rates:
            times = sooner(arm, exact, rate, warm_up_of(name))
            cells.append("\N{EN DASH}" if math.isnan(times) else f"{times:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def not_trained(
    places: dict[tuple[str, int], dict[str, dict[str, Any]]], names: Sequence[str]
) -> list[str]:
    """Lines that name the algorithms that a task lacks; empty if none does."""
    lines = []
    for task in TASKS:
        for ranks in RANKS:
            arms = places.get((task, ranks), {})
            lacking = [name for name in names if name not in arms or not arms[name]["seeds"]]
            what = "; ".join(lacking) if len(lacking) < len(names) else "everything"
            lines += [f"- {task} with {ranks} ranks: {what}"] if lacking else []
    return ["Not trained yet:\n", *lines, ""] if lines else []


def write_page(results: dict[str, Any], path: Path, names: Sequence[str]) -> None:
    """Write the page; names: all algorithms, in the order of the rows."""
    machine, places = results["machine"], sorted_by_place(results["runs"])
    timed = any(arm["seconds"] for arms in places.values() for arm in arms.values())
    parts = [HEAD + SOONER if timed else HEAD]
    parts.append(
        f"Measured on {machine['cores']} cores of {machine['processor']}, torch "
        f"{machine['torch']}, on {machine['date']}.\n"
    )
    parts += not_trained(places, names)
    for (task, ranks), arms in sorted(places.items()):
        arms = {name: arms[name] for name in names if name in arms and arms[name]["seeds"]}
        if "exact" not in arms:
            continue
        steps = arms["exact"]["seeds"][min(arms["exact"]["seeds"])]["step"][-1]
        parts.append(f"## {TASKS[task].title}: {ranks} ranks\n")
        parts.append(f"{steps} steps, {counted_seeds(len(arms['exact']['seeds']))}.\n")
        parts.append(table(arms) + "\n")
    path.write_text(re.sub(r"\n{3,}", "\n\n", "\n".join(parts)))
