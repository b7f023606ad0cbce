"""Seconds until `auto` has the held-out loss with which torch's DDP ends, on a slow network.

    python benchmarks/bench_time_to_loss.py [--rate 200] [--tasks text fashion] [--seeds 0]

Two ranks in network namespaces of so many Mbit/s, which need root. Both train for real on that
network: DDP as many steps as the task has; `auto` by a schedule that is a tenth longer, until its
loss is as low. Evaluations are not counted, what `auto` measures at first is. Exits with 1 where
`auto` is less than 3 times as soon. Results are written to
build/benchmarks/bench_time_to_loss.json, where those of other tasks stay.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from common import keep_cases
from curve_runs import Training
from curve_tasks import TASKS, evaluate
from rank_processes import figures_of
from torch.nn.parallel import DistributedDataParallel

TARGET = 3.0
RANKS = 2
POINTS = 50  # evaluations of a run of DDP
LONGER = 1.1


class TrainingWithDdp(Training):
    def wrap(self):
        optimizer = self.task.optimizer(self.model.parameters())
        self.model = DistributedDataParallel(self.model)
        return optimizer

    def measure(self):
        return evaluate(self.model.module, self.test_inputs, self.test_targets)


def train(training, steps, every, until=None):
    """[(step, seconds, loss)] of every `every`th step and the last one, to the first of at most the
    loss `until`."""
    schedule = torch.optim.lr_scheduler.LinearLR(training.optimizer, 1.0, 0.05, steps)
    seconds, points = 0.0, []
    dist.barrier()
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        training.step()
        schedule.step()
        if step % every and step != steps:
            continue
        seconds += time.perf_counter() - begun
        loss = torch.tensor(training.measure()[0])
        dist.broadcast(loss, 0)
        points.append((step, seconds, loss.item()))
        if until is not None and loss <= until:
            break
        dist.barrier()
        begun = time.perf_counter()
    return points


def measure(name, seed, steps):
    """Figures of rank 0."""
    bagua.init_process_group()
    task = TASKS[name]
    steps = steps or task.steps
    every = max(1, steps // POINTS)
    data = task.data(dist.get_rank(), RANKS)
    exact = train(TrainingWithDdp(task, "ddp", seed, data), steps, every)
    target = exact[-1][2]
    training = Training(task, "auto", seed, data)
    auto = train(training, round(steps * LONGER), every, target)
    reached = auto[-1][2] <= target
    return {
        "task": name,
        "seed": seed,
        "loss": target,
        "ddp": exact,
        "auto": auto,
        "chosen": training.model.bagua_stats()["choice"]["chosen"],
        "sooner": exact[-1][1] / auto[-1][1] if reached else None,
    }


def show(case):
    ddp, auto = case["ddp"][-1], case["auto"][-1]
    found = f"{case['sooner']:.2f} times as soon" if case["sooner"] else "not as low"
    print(
        f"{case['task']}, {case['rate']} Mbit/s, seed {case['seed']}: DDP {ddp[0]} steps, "
        f"{ddp[1]:.0f} s, loss {ddp[2]:.3f}; auto ({case['chosen']}) {auto[0]} steps, "
        f"{auto[1]:.0f} s, {auto[2]:.3f}: {found}, target {TARGET}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="200", help="Mbit/s, or none: unshaped")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["text", "fashion"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--quick", action="store_true", help="40 steps, not kept")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_output:
        figures = measure(arguments.tasks[0], arguments.seeds[0], arguments.steps)
        if dist.get_rank() == 0:
            Path(arguments.rank_output).write_text(json.dumps(figures))
        return bagua.destroy_process_group()

    cases = []
    for task in arguments.tasks:
        for seed in arguments.seeds:
            options = ["--tasks", task, "--seeds", seed, *(["--steps", 40] * arguments.quick)]
            figures = figures_of(arguments.rate, __file__, options, RANKS)
            cases.append({"rate": arguments.rate, **figures})
            show(cases[-1])
            if not arguments.quick:
                keep_cases("bench_time_to_loss", cases, ["rate", "task", "seed"], ranks=RANKS)
    late = [f"{case['task']}, seed {case['seed']}" for case in cases if not reached(case)]
    if late:
        sys.exit(f"bench_time_to_loss: less than {TARGET} times as soon: {'; '.join(late)}")


def reached(case):
    return case["sooner"] is not None and case["sooner"] >= TARGET


if __name__ == "__main__":
    main()
