"""Cost of comparing a sample of the weights in each round, relative to a training step.

    python benchmarks/bench_weights_sample.py [--quick]

Hashing the sample is all that a round pays: the hash is sent in a message that is sent anyway. It
is timed in C++ between the steps of a model, so that it finds the caches as an optimizer leaves
them. The step is that of one process on one thread that communicates nothing, the shortest there
is. Prints JSON and keeps it under build/benchmarks/.
"""

import argparse
import json
import statistics
import time

import step_arms
import torch
from bagua import _C
from common import machine, write_results
from torch import nn
from torch.nn.functional import cross_entropy

LIMIT = 0.005
EVERY = 100  # the default


def perceptron(width):
    """Two square layers and a small one."""
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, step_arms.CLASSES)), (width,)


CASES = {
    "0.1 M, perceptron": lambda: perceptron(200),
    "1 M, perceptron": lambda: perceptron(680),
    "8.7 M, VGG-like": lambda: (step_arms.make_model(), (3, 32, 32)),
}


def check():
    """A sample that saw nothing would be fast."""
    weights = torch.ones(100_000)
    sample = _C.WeightsSample([("w", weights)], EVERY)
    before = [sample.take(number) for number in range(EVERY)]
    weights[77_777] = 2
    changed = [sample.take(n) != before[n] for n in range(EVERY)]
    if sum(changed) != 1:
        raise SystemExit("a changed element is not seen in one round")


def measure(make, steps):
    model, shape = make()
    optimizer = step_arms.sgd(model.parameters())
    sample = _C.WeightsSample(list(model.named_parameters()), EVERY)
    inputs = torch.randn(step_arms.BATCH, *shape)
    targets = torch.randint(0, step_arms.CLASSES, (step_arms.BATCH,))
    step_ns, sample_ns = [], []
    for number in range(steps + 5):
        start = time.perf_counter_ns()
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        step_ns.append(time.perf_counter_ns() - start)
        sample_ns.append(sample.take_ns(number))
    step_ns, sample_ns = step_ns[5:], sample_ns[5:]
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": parameters,
        "windows": sample.windows,
        "bytes_per_round": 4 * parameters // sample.windows,
        "step_ns": {"median": statistics.median(step_ns), "min": min(step_ns)},
        "sample_ns": {"median": statistics.median(sample_ns), "min": min(sample_ns)},
        "gigabytes_per_second": 4 * parameters / sample.windows / statistics.median(sample_ns),
        "share_of_medians": statistics.median(sample_ns) / statistics.median(step_ns),
        "share_of_sums": sum(sample_ns) / sum(step_ns),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    check()
    steps = 20 if arguments.quick else 150
    cases = {name: measure(make, steps) for name, make in CASES.items()}
    payload = {
        "machine": machine(),
        "every": EVERY,
        "cases": cases,
        "limit": LIMIT,
        "within_limit": max(case["share_of_medians"] for case in cases.values()) < LIMIT,
    }
    print(json.dumps(payload, indent=2))
    if not arguments.quick:
        write_results("bench_weights_sample", payload)


if __name__ == "__main__":
    main()
