"""The tables of curves in docs/, from the results of curves.py."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curve_runs import warm_up_of
from curve_tasks import TASKS

RANKS = (2, 4)
Places = dict[tuple[str, int], dict[str, dict[str, Any]]]
ABOVE = """# For docs/which-algorithm.md

Loss above that of exact gradients at the end of training, on held-out data: the mean over the
seeds. Bold: above exact gradients by more than the noise. In parentheses: seeds lie too far apart
to tell.
"""
CURVES = """# For docs/findings.md
"""
SOONER = """\
Speed-up: how many times sooner than exact gradients a run reached the loss with which those ended,
plus half of their 95 % interval. Steps of a warm-up count as exact ones. A dash: it never reached
that loss.
"""


def interval(values: list[float]) -> float:
    """Half of the 95 % interval of the mean; not a number for a single value, or with such."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    from scipy.stats import t

    return t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def sorted_by_place(runs: dict[str, Any]) -> Places:
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


def loss_of(arm: dict[str, Any], seeds: int) -> str:
    """The last loss: mean and half of the 95 % interval; ``seeds``: those of exact gradients."""
    losses = [curve["loss"][-1] for curve in arm["seeds"].values()]
    if no_number(losses):
        return f"no number with {no_number(losses)} of {counted_seeds(len(losses))}"
    half = interval(losses)
    text = f"{statistics.mean(losses):.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")
    return text + (f", {counted_seeds(len(losses))}" if len(losses) < seeds else "")


def above_of(arm: dict[int, Any], exact: dict[int, Any]) -> str:
    """The mean difference from exact gradients, marked as ``ABOVE`` says."""
    differences = above(arm, exact)
    if not differences:
        return ""
    if no_number(differences):
        return "**NaN**"
    text, words = f"{statistics.mean(differences):+.3f}", verdict(arm, exact)
    return {"worse": f"**{text}**", "unclear": f"({text})", "one seed": f"({text})"}.get(
        words, text
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def table_of_differences(places: Places, names: Sequence[str]) -> str:
    """A row per algorithm, a column per task and number of ranks."""
    columns = [place for place in sorted(places) if "exact" in places[place]]
    head = ["algorithm", *(f"{task}, {ranks} ranks" for task, ranks in columns)]
    rows = []
    for name in names:
        arms = [(places[place].get(name), places[place]["exact"]) for place in columns]
        if name != "exact" and any(arm for arm, _ in arms):
            differences = [above_of(a["seeds"], e["seeds"]) if a else "" for a, e in arms]
            rows.append([name, *differences])
    return table(head, rows)


def table_of_task(by_ranks: dict[int, dict[str, Any]], names: Sequence[str]) -> str:
    """A row per algorithm; loss, accuracy and speed-up on the slowest network by ranks."""
    head, rows = ["algorithm"], {name: [name] for name in names}
    for ranks, arms in by_ranks.items():
        rate = min({r for arm in arms.values() for r in arm["seconds"]}, key=int, default=None)
        head += [f"{ranks} ranks: loss", "accuracy"]
        head += [] if rate is None else [f"speed-up, {rate} Mb/s"]
        for name in names:
            rows[name] += cells_of(name, arms, rate)
    return table(head, [row for row in rows.values() if any(row[1:])])


def cells_of(name: str, arms: dict[str, Any], rate: str | None) -> list[str]:
    arm, exact = arms.get(name), arms["exact"]
    if not arm or not arm["seeds"]:
        return [""] * (2 if rate is None else 3)
    curves = list(arm["seeds"].values())
    cells = [loss_of(arm, len(exact["seeds"]))]
    cells.append(f"{statistics.mean(c['accuracy'][-1] for c in curves):.1%}")
    if rate is not None:
        times = sooner(arm, exact, rate, warm_up_of(name))
        cells.append("\N{EN DASH}" if math.isnan(times) else f"{times:.2f}")
    return cells


def not_trained(places: Places, names: Sequence[str]) -> list[str]:
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
    """Write the tables; names: all algorithms, in the order of the rows."""
    machine, places = results["machine"], sorted_by_place(results["runs"])
    timed = any(arm["seconds"] for arms in places.values() for arm in arms.values())
    parts = not_trained(places, names)
    parts += [ABOVE, table_of_differences(places, names), CURVES]
    parts.append(
        f"Measured on {machine['cores']} cores of {machine['processor']}, torch "
        f"{machine['torch']}, on {machine['date']}.\n"
    )
    parts += [SOONER] if timed else []
    for task, description in TASKS.items():
        by_ranks = {r: places[task, r] for r in RANKS if "exact" in places.get((task, r), {})}
        for arms in list(by_ranks.values())[:1]:
            seeds = arms["exact"]["seeds"]
            steps = seeds[min(seeds)]["step"][-1]
            parts.append(f"## {description.title}\n")
            parts.append(f"{steps} steps, {counted_seeds(len(seeds))}.\n")
            parts.append(table_of_task(by_ranks, names))
    path.write_text("\n".join(parts))
