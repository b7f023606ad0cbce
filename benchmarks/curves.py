"""Curves of every algorithm on three tasks of real data, over steps, bytes and seconds.

    python benchmarks/curves.py [--quick] [--tasks digits fashion text] [--arms exact bytegrad ...]
    python benchmarks/curves.py --report     # the page from what is kept

Trains every task with every algorithm, 3 seeds, 2 and 4 ranks on this machine, and measures the
loss and accuracy of the mean of the ranks' weights on held-out data. Then times a step of each on
networks of 1 Gb/s and 200 Mb/s (namespaces; needs root). Each run is kept in
build/benchmarks/curves.json as it ends: a second start goes on where the first was ended. Writes
build/benchmarks/curves.md: docs/which-algorithm.md and docs/findings.md have its tables. About 6
hours on 2 cores.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, machine
from curve_report import RANKS, write_page
from curve_runs import ARMS
from curve_tasks import FASHION_MNIST, TASKS, DataUnavailableError
from rank_processes import run_on

SEEDS = (0, 1, 2)
RATES = ("1000", "200")  # Mbit/s
POINTS = 16  # measurements on the way


def run_rank(arguments: argparse.Namespace) -> None:
    """Program of each rank: the missing runs of one task, in turn."""
    import bagua.torch_api as bagua
    import torch
    from curve_runs import curve, seconds_per_step, show

    torch.set_num_threads(1)
    bagua.init_process_group(backend="gloo")
    order = json.loads(arguments.order)
    task = TASKS[order["task"]]
    data = data_of(order["task"], bagua.get_rank(), bagua.get_world_size(), arguments)
    for arm, seed in order["runs"]:
        if order["rate"] is None:
            result: Any = curve(
                task, arm, seed, data, order["steps"] or task.steps, order["points"]
            )
        else:
            result = seconds_per_step(task, arm, data)
        if bagua.get_rank() == 0:
            order["done"] += 1
            place = order["rate"] or "seed"
            key = key_of(order["task"], arm, bagua.get_world_size(), place, seed)
            keep(arguments.results, key, result)
            title = f"{order['task']}, {arm}, {bagua.get_world_size()} ranks, {place} {seed}"
            show(order["done"], order["of"], title, order["began"])
    bagua.destroy_process_group()


def data_of(task: str, rank: int, ranks: int, arguments: argparse.Namespace) -> Any:
    options = {"folder": arguments.fashion_mnist} if task == "fashion" else {}
    return TASKS[task].data(rank, ranks, **options)


def key_of(task: str, arm: str, ranks: int, place: str, seed: int) -> str:
    return f"{task} | {arm} | {ranks} ranks | {place} {seed}"


def kept(path: Path) -> dict[str, Any]:
    """Everything that was made so far."""
    return json.loads(path.read_text()) if path.exists() else {"machine": machine(), "runs": {}}


def keep(path: Path, key: str, result: Any) -> None:
    """Add a run to the results; an end of this program at any moment leaves them whole."""
    results = kept(path)
    results["runs"][key] = result
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)


def missing(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Orders for run_rank: one per task, number of ranks and network."""
    have = kept(arguments.results)["runs"]
    orders = []
    for task in arguments.tasks:
        for ranks in arguments.ranks:
            for rate in [None, *arguments.rates]:
                seeds, place = (arguments.seeds, "seed") if rate is None else ([0], rate)
                runs = [
                    (arm, seed)
                    for arm in arguments.arms
                    for seed in seeds
                    if key_of(task, arm, ranks, place, seed) not in have
                ]
                if runs:
                    orders.append({"task": task, "ranks": ranks, "rate": rate, "runs": runs})
    return orders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="digits, one seed, few steps; not kept"
    )
    parser.add_argument("--report", action="store_true", help="write the page only")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--rates", nargs="*", default=list(RATES), help="Mbit/s; none: no timing")
    parser.add_argument("--steps", type=int, help="of every run, instead of the task's")
    parser.add_argument("--fashion-mnist", default=FASHION_MNIST, help="folder of the .gz files")
    parser.add_argument("--results", type=Path, default=RESULTS / "curves.json")
    parser.add_argument("--order", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.order:
        return run_rank(arguments)
    if arguments.quick:
        arguments.results = Path(tempfile.mkdtemp()) / "curves.json"
        arguments.tasks, arguments.ranks, arguments.seeds, arguments.rates = (
            ["digits"],
            [2],
            [0],
            [],
        )
        arguments.arms, arguments.steps = ["exact", "bytegrad"], 24
    if not arguments.report:
        train_missing(arguments)
    results = kept(arguments.results)
    if arguments.quick:
        print(json.dumps(results["runs"], indent=2))
    else:
        write_page(results, arguments.results.with_suffix(".md"), list(ARMS))


def train_missing(arguments: argparse.Namespace) -> None:
    """Make all runs that are not kept yet."""
    for task in arguments.tasks:  # before hours of training, not after
        try:
            data_of(task, 0, 2, arguments)
        except DataUnavailableError as error:
            sys.exit(f"curves, task {task}: {error}")
    orders = missing(arguments)
    progress = {"of": sum(len(order["runs"]) for order in orders), "done": 0}
    progress["began"] = time.monotonic()
    for order in orders:
        order |= progress | {"steps": arguments.steps, "points": POINTS}
        own = [sys.executable, __file__, "--order", json.dumps(order)]
        own += ["--results", str(arguments.results), "--fashion-mnist", arguments.fashion_mnist]
        run_on(order["rate"] or "none", own, order["ranks"])
        progress["done"] += len(order["runs"])
    print(file=sys.stderr)


if __name__ == "__main__":
    main()
