"""Cost of data parallelism per step with next to nothing to compute or send.

    python benchmarks/bench_overhead.py [--quick]

One rank, 500 parameters of 8 elements: the time over that of the bare model is all hooks, buckets
and bookkeeping. The bare model, torch DDP and bagua take turns in one process. Prints JSON and
keeps it under build/benchmarks/.
"""

import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist
from common import machine, timed, write_results
from torch import nn

PARAMETERS = 500
NUMEL = 8


class ManyTinyParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(NUMEL) for _ in range(PARAMETERS))

    def forward(self, scale):
        return (torch.stack(list(self.weights)) * scale).sum()


def make_step(wrap):
    torch.manual_seed(0)
    model = ManyTinyParameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = wrap(model, optimizer)
    scale = torch.ones(NUMEL)

    def step():
        optimizer.zero_grad()
        wrapped(scale).backward()
        optimizer.step()

    return step, model


def wrap_with_ddp(model, optimizer):
    return nn.parallel.DistributedDataParallel(model)


def wrap_with_bagua(model, optimizer):
    import bagua.torch_api as bagua

    bagua.init_process_group()
    algorithm = bagua.algorithms.Algorithm.init("gradient_allreduce", hierarchical=False)
    return model.with_bagua([optimizer], algorithm)


ARMS = {
    "bare": lambda model, optimizer: model,
    "ddp": wrap_with_ddp,
    "bagua": wrap_with_bagua,
}


def measure(names, rounds, repeats):
    """Seconds per step of each arm (median of the rounds) and what it costs over the bare model."""
    arms = {name: make_step(ARMS[name]) for name in names}
    seconds = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            step, _ = arms[name]
            seconds[name].append(timed(step, repeats=repeats, warmup=3)["median"])
    expected = torch.stack(list(arms["bare"][1].weights))
    for name, (_, model) in arms.items():
        torch.testing.assert_close(
            torch.stack(list(model.weights)), expected, msg=f"{name} is wrong"
        )

    overhead = {
        name: [
            with_arm - bare for with_arm, bare in zip(seconds[name], seconds["bare"], strict=True)
        ]
        for name in names
        if name != "bare"
    }
    figures = {
        "parameters": PARAMETERS,
        "rounds": rounds,
        "seconds_per_step": {name: statistics.median(values) for name, values in seconds.items()},
        "overhead_seconds": {name: statistics.median(values) for name, values in overhead.items()},
    }
    if {"ddp", "bagua"} <= overhead.keys():
        ratios = [ours / ddp for ours, ddp in zip(overhead["bagua"], overhead["ddp"], strict=True)]
        figures["bagua_overhead_over_ddp"] = statistics.median(ratios)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rounds, repeats = (3, 10) if arguments.quick else (20, 50)
    figures = measure(arguments.arms, rounds, repeats)
    payload = {"machine": machine(), **figures}
    print(json.dumps(payload, indent=2))
    if not arguments.quick:
        write_results("bench_overhead", payload)


if __name__ == "__main__":
    main()
