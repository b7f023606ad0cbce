"""AutoAlgorithm against the candidates that it chooses from: seconds of a step after the choice.

    python benchmarks/bench_auto.py [--rates none 1000 200 20] [--tasks vgg text tiny] [--quick]
    python benchmarks/bench_auto.py --rates none --cost --turns 40

Two ranks on links of so many Mbit/s (none: unshaped), in network namespaces, which need root. All
arms take turns within one process; ratios are medians over the turns. An arm for each candidate
that `auto` has by default, and one for `auto`, which first trains until it has chosen.
Exits with 1 where `auto` takes more than 1.05 times the best candidate's step. Results are written
to build/benchmarks/bench_auto.json, where those of other links and models stay.

With --cost only `auto` and exact gradients take turns, for what `auto` costs where it has chosen
them: at most 1.01 times exact steps. They train one model, which is wrapped anew for each turn,
`auto` with no other candidate: two models differ by more than that in where their memory lies. A
turn is as long as a window after which the ranks of `auto` compare their steps, two seconds. Exact
gradients have a second turn, which says how far equal ones are apart. Results are in
bench_auto_cost.json.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import Algorithm
from common import keep_cases
from rank_processes import figures_of
from torch import nn
from torch.nn.functional import cross_entropy

TARGET, COST_TARGET = 1.05, 1.01
RANKS = 2
EXACT, EXACT_AGAIN = "gradient_allreduce", "exact again"
ARMS = {
    EXACT: (EXACT, {}),
    "bytegrad": ("bytegrad", {"hierarchical": False}),
    "bytegrad int4_block": (
        "bytegrad",
        {"hierarchical": False, "codec": "int4_block", "error_feedback": True},
    ),
    "auto": ("auto", {}),
}
#: An arm is timed for so long in each turn, one step at least.
SECONDS_OF_A_TURN, SECONDS_OF_A_TURN_OF_COST = 0.6, 2.0
#: Before that it trains for so long, one step at least: a connection that was idle while other arms
#: had their turns begins slowly.
SECONDS_BEFORE = 1.0


class Tiny(nn.Module):
    """500 layers of 272 parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(500)])

    def forward(self, x):
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x


def vgg(rank):
    from step_arms import BATCH, CLASSES, make_model, sgd

    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return make_model(), sgd, lambda model: cross_entropy(model(images), labels)


def text(rank):
    from curve_tasks import TASKS, loss_of

    task = TASKS["text"]
    inputs, targets, *_ = task.data(rank, RANKS)
    inputs, targets = inputs[: task.batch], targets[: task.batch]
    return task.make_model(), task.optimizer, lambda model: loss_of(model, inputs, targets)


def tiny(rank):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    return Tiny(), lambda p: torch.optim.SGD(p, lr=1e-3), lambda model: model(x).square().mean()


TASKS = {"vgg": vgg, "text": text, "tiny": tiny}


class Arm:
    """A copy of the model that is trained by one algorithm."""

    def __init__(self, name, model, make_optimizer, loss):
        self.model = copy.deepcopy(model)
        self.optimizer = make_optimizer(self.model.parameters())
        self.loss = loss
        self.steps_before = self.steps_of_a_turn = 1
        self.wrap(*ARMS[name])

    def wrap(self, registered, arguments):
        self.model.with_bagua([self.optimizer], Algorithm.init(registered, **arguments))

    def step(self):
        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        self.optimizer.step()

    def seconds_per_step(self):
        for _ in range(self.steps_before):
            self.step()
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(self.steps_of_a_turn):
            self.step()
        return (time.perf_counter() - begun) / self.steps_of_a_turn

    def warm_up(self, seconds_of_a_turn=SECONDS_OF_A_TURN, most=50):
        """Find how many steps a turn has."""
        seconds = torch.tensor(self.seconds_per_step())
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        self.steps_of_a_turn = steps_within(seconds_of_a_turn, seconds.item(), most)
        self.steps_before = steps_within(SECONDS_BEFORE, seconds.item(), most)

    def choice(self):
        return self.model.bagua_stats()["choice"]


def steps_within(seconds, seconds_per_step, most):
    return min(most, max(1, int(seconds / seconds_per_step)))


def arm_that_has_chosen(parts):
    """An arm of `auto`, and the steps and seconds until its choice."""
    auto = Arm("auto", *parts)
    begun, steps = time.perf_counter(), 0
    while auto.choice()["state"] != "chosen":
        auto.step()
        steps += 1
    return auto, steps, time.perf_counter() - begun


def in_turns(turns, names, seconds_per_step):
    """Seconds per step of each arm in each turn; every second turn goes backwards."""
    seconds = {name: [] for name in names}
    for turn in range(turns):
        for name in names if turn % 2 == 0 else reversed(names):
            seconds[name].append(seconds_per_step(name))
    return seconds


def median_ratio(own, others):
    return statistics.median(a / b for a, b in zip(own, others, strict=True))


def measure(task, turns):
    """Figures of rank 0."""
    parts = TASKS[task](dist.get_rank())
    auto, steps, probe = arm_that_has_chosen(parts)
    arms = {name: auto if name == "auto" else Arm(name, *parts) for name in ARMS}
    for arm in arms.values():
        arm.warm_up()
    seconds = in_turns(turns, list(arms), lambda name: arms[name].seconds_per_step())
    for name, arm in arms.items():
        check(name, arm.model)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min((name for name in medians if name != "auto"), key=medians.get)
    return {
        "seconds": medians,
        "best": best,
        "to_best": median_ratio(seconds["auto"], seconds[best]),
        "to_exact": median_ratio(seconds["auto"], seconds[EXACT]),
        "choice": auto.choice(),
        "probe_steps": steps,
        "probe_seconds": probe,
    }


def measure_cost(task, turns):
    """Figures of rank 0: one model, wrapped anew for each turn."""
    arm = Arm(EXACT, *TASKS[task](dist.get_rank()))
    ways = {EXACT: ARMS[EXACT], "auto": ("auto", {"candidates": []}), EXACT_AGAIN: ARMS[EXACT]}
    arm.warm_up(SECONDS_OF_A_TURN_OF_COST, most=200)

    def seconds_per_step(name):
        arm.wrap(*ways[name])
        return arm.seconds_per_step()

    seconds = in_turns(turns, list(ways), seconds_per_step)
    check("the model of all arms", arm.model)
    exact = seconds[EXACT] + seconds[EXACT_AGAIN]
    return {
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "to_exact": median_ratio(seconds["auto"] * 2, exact),
        "exact_to_exact": median_ratio(seconds[EXACT], seconds[EXACT_AGAIN]),
        "quartiles": statistics.quantiles(
            [auto / theirs for auto, theirs in zip(seconds["auto"] * 2, exact, strict=True)]
        ),
        "turns": turns,
    }


def check(name, model):
    """All ranks hold the same finite weights, or RuntimeError."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    own = flat.view(torch.int32).sum(dtype=torch.int64)
    sums = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, own)
    if not flat.isfinite().all() or any(other != own for other in sums):
        raise RuntimeError(f"{name}: weights are not finite, or differ between ranks")


def print_cost(cases):
    print("| Mbit/s | model | auto to exact | exact to exact |")
    print("|---:|---|---:|---:|")
    for case in cases:
        ratios = f"{case['to_exact']:.4f} | {case['exact_to_exact']:.4f}"
        print(f"| {case['rate']} | {case['task']} | {ratios} |")


def print_table(cases):
    print(
        "| Mbit/s | model | auto chose | best | exact | 8 bits | 4 bits | auto | to best | probe |"
    )
    print("|---:|---|---|---|---:|---:|---:|---:|---:|---:|")
    for case in cases:
        times = " | ".join(f"{case['seconds'][name] * 1e3:.1f} ms" for name in ARMS)
        print(
            f"| {case['rate']} | {case['task']} | {case['choice']['chosen']} | {case['best']} "
            f"| {times} | {case['to_best']:.3f} "
            f"| {case['probe_steps']} steps, {case['probe_seconds']:.1f} s |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["none", "1000", "200", "20"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--quick", action="store_true", help="one turn, for a first impression")
    parser.add_argument("--cost", action="store_true", help="auto beside exact gradients only")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rank-output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    turns = 1 if arguments.quick else arguments.turns
    if arguments.rank_output:
        bagua.init_process_group()
        torch.manual_seed(0)
        figures = (measure_cost if arguments.cost else measure)(arguments.tasks[0], turns)
        if dist.get_rank() == 0:
            Path(arguments.rank_output).write_text(json.dumps(figures))
        return bagua.destroy_process_group()

    show = print_cost if arguments.cost else print_table
    cases = []
    for rate in arguments.rates:
        for task in arguments.tasks:
            slow = rate == "20" and task == "vgg"  # an exact step takes 15 seconds
            options = ["--tasks", task, "--turns", 1 if slow else turns]
            options += ["--cost"] * arguments.cost
            figures = figures_of(rate, __file__, options, RANKS)
            cases.append({"rate": rate, "task": task, **figures})
            show(cases[-1:])
    show(cases)
    if not arguments.quick:
        name = "bench_auto" + "_cost" * arguments.cost
        keep_cases(name, cases, ["rate", "task"], ranks=RANKS)
    key, target = ("to_exact", COST_TARGET) if arguments.cost else ("to_best", TARGET)
    late = [case for case in cases if case[key] > target]
    if late:
        names = ", ".join(f"{case['task']} at {case['rate']}" for case in late)
        sys.exit(f"bench_auto: {key} is more than {target}: {names}")


if __name__ == "__main__":
    main()
