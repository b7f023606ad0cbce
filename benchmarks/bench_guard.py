"""Losses with and without a guard where compression fails and where it does not, and the cost.

    python benchmarks/bench_guard.py [--tasks text digits fashion] [--seeds 0 1 2] [--steps 300]
    python benchmarks/bench_guard.py --cost

Trains the tasks of curves.py on 2 ranks of this machine, each algorithm alone and with `Guard()`,
and measures the loss on held-out data. Runs that are in build/benchmarks/bench_guard.json are not
made again. --cost: processor time of the guard beside that of a step.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path

from common import RESULTS, machine
from rank_processes import run_on

RANKS = 2
FAILING = ("sparse 1 %", "bytegrad minmax_uint8", "power_sgd rank 4")
HEALTHY = ("exact", "bytegrad", "qadam")
COST_STEPS, COST_TURNS = 50, 6


def training(task, arm, seed, data, guard):
    """The training of curve_runs with a guard, and the warnings of the guard so far."""
    import torch
    from curve_runs import Training

    plain = torch.nn.Module.with_bagua

    def with_guard(self, optimizers, algorithm):
        return plain(self, optimizers, algorithm, guard=guard)

    torch.nn.Module.with_bagua = with_guard
    try:
        return Training(task, arm, seed, data)
    finally:
        torch.nn.Module.with_bagua = plain


def train(task, arm, seed, steps, guard):
    """(loss, breaches) after `steps`."""
    import bagua.torch_api as bagua
    import torch

    data = task.data(bagua.get_rank(), RANKS)
    run = training(task, arm, seed, data, guard)
    schedule = torch.optim.lr_scheduler.LinearLR(run.optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        run.step()
        schedule.step()
    loss, accuracy = run.measure()
    found = run.model.bagua_stats().get("guard")
    result = {"loss": loss, "accuracy": accuracy}
    if found is not None:
        result |= {"breaches": found["breaches"], "checks": found["checks"]}
    run.close()
    run.model.bagua_ddp.close()
    return result


def cost(task):
    """Processor time of the main thread in the guard, of a step, and bytes, per round.

    Processor time, since it does not depend on what else runs; the wait of a check for the other
    rank's message is not in it.
    """
    import bagua.torch_api as bagua
    from bagua.torch_api import Guard

    data = task.data(bagua.get_rank(), RANKS)
    run = training(task, "bytegrad", 0, data, Guard())
    guard = run.model.bagua_guard
    begin_round, in_guard, of_steps = guard.begin_round, [], []

    def timed(*arguments):
        start = time.thread_time()
        begin_round(*arguments)
        in_guard.append(time.thread_time() - start)

    for _ in range(2 * COST_STEPS):  # the guard's frequent checks are over
        run.step()
    sent = run.model.bagua_stats()["communicators"]["guard"]["bytes_sent"]
    guard.begin_round = timed
    for _ in range(COST_TURNS * COST_STEPS):
        start = time.thread_time()
        run.step()
        of_steps.append(time.thread_time() - start)
    sent = run.model.bagua_stats()["communicators"]["guard"]["bytes_sent"] - sent
    return {
        "us_in_guard_per_step": statistics.mean(in_guard) * 1e6,
        "us_of_a_check": max(in_guard) * 1e6,
        "ms_per_step": statistics.mean(of_steps) * 1e3,
        "share": sum(in_guard) / sum(of_steps),
        "guard_bytes_per_step": sent / len(of_steps),
    }


def run_rank(order):
    """Program of each rank."""
    import bagua.torch_api as bagua
    import torch
    from bagua.torch_api import Guard
    from curve_tasks import TASKS

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    bagua.init_process_group(backend="gloo")
    task = TASKS[order["task"]]
    for key, arm, seed, is_guarded in order["runs"]:
        guard = Guard() if is_guarded else None
        result = cost(task) if arm == "cost" else train(task, arm, seed, order["steps"], guard)
        if bagua.get_rank() == 0:
            print(f"{key}: {json.dumps(result)}", flush=True)
            keep(Path(order["results"]), key, result)
    bagua.destroy_process_group()


def kept(path):
    return json.loads(path.read_text()) if path.exists() else {"machine": machine(), "runs": {}}


def keep(path, key, result):
    results = kept(path)
    results["runs"][key] = result
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["text", "digits", "fashion"])
    parser.add_argument("--arms", nargs="+", default=[*HEALTHY, *FAILING])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cost", action="store_true", help="only the cost")
    parser.add_argument("--results", type=Path, default=RESULTS / "bench_guard.json")
    parser.add_argument("--order", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.order:
        return run_rank(json.loads(arguments.order))
    have = kept(arguments.results)["runs"]
    for task in arguments.tasks:
        if arguments.cost:
            runs = [(f"{task} | cost", "cost", 0, False)]
        else:
            runs = [
                (f"{task} | {arm} | {arguments.steps} steps | seed {seed} | {how}", arm, seed, g)
                for seed in arguments.seeds
                for arm in arguments.arms
                for how, g in (("alone", False), ("guarded", True))
            ]
            runs = [run for run in runs if run[0] not in have]
        if runs:
            order = {"task": task, "steps": arguments.steps, "runs": runs}
            order["results"] = str(arguments.results.resolve())
            run_on("none", [sys.executable, __file__, "--order", json.dumps(order)], RANKS)


if __name__ == "__main__":
    main()
