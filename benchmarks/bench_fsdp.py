"""Seconds per training step of a model sharded by torch's FSDP2, with bagua.fsdp and without.

    python benchmarks/bench_fsdp.py [--quick] [--rates none 200] [--pairs 5]

The model is that of bench_step.py; every layer with parameters is a module of FSDP. All arms run in
the same two processes in turn. Shaped networks need root. Prints JSON and keeps it under
build/benchmarks/.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path

from common import machine, write_results
from network import DEVICE
from rank_processes import figures_of

RANKS = 2
WARM_UP = 2

# Arguments of compress() (None: exact), and whether weights are given up after forward.
ARMS = {
    "fsdp": (None, True),
    "gradients": ({}, True),
    "gradients_and_weights": ({"weights": True}, True),
    "fsdp_kept": (None, False),
    "gradients_kept": ({}, False),
}
PEERS = {"gradients": "fsdp", "gradients_and_weights": "fsdp", "gradients_kept": "fsdp_kept"}


def bytes_on_the_wire():
    """Sent so far through the interface of this rank's namespace, headers included; 0: no such."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == DEVICE:
            return int(counters.split()[8])
    return 0


class Arm:
    """A sharded copy of the model; ``step`` is what is timed."""

    def __init__(self, name, model):
        import bagua.fsdp
        import torch
        import torch.distributed as dist
        from step_arms import BATCH, CLASSES, sgd
        from torch.distributed.fsdp import fully_shard

        options, reshard = ARMS[name]
        self.model = copy.deepcopy(model)
        for layer in self.model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(self.model, reshard_after_forward=reshard)
        self.handle = None if options is None else bagua.fsdp.compress(self.model, **options)
        self.optimizer = sgd(self.model.parameters())
        self.steps = 0
        self.wire_bytes = 0
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn(BATCH, 3, 32, 32, generator=generator)
        self.labels = torch.randint(CLASSES, (BATCH,), generator=generator)

    def step(self):
        from torch.nn.functional import cross_entropy

        self.optimizer.zero_grad()
        cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()
        self.steps += 1

    def seconds_per_step(self, steps):
        """Mean over consecutive steps that all ranks start together."""
        import torch.distributed as dist

        dist.barrier()
        before, start = bytes_on_the_wire(), time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = (time.perf_counter() - start) / steps
        self.wire_bytes += bytes_on_the_wire() - before
        return seconds

    def bytes_per_step(self):
        """By this rank through bagua; None where torch sends everything."""
        if self.handle is None:
            return None
        return self.handle.stats()["total"]["bytes_sent"] / self.steps

    def weights(self):
        import torch

        with torch.no_grad():
            return torch.cat([p.full_tensor().flatten() for p in self.model.parameters()])


def run_rank(arguments):
    """Program of each rank; its place in the group is in its environment."""
    import torch
    import torch.distributed as dist
    from step_arms import make_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = make_model()
    arms = {name: Arm(name, model) for name in arguments.arms}
    for arm in arms.values():
        arm.seconds_per_step(WARM_UP)
    seconds = {name: [] for name in arms}
    for pair in range(arguments.pairs):
        for name in arguments.arms if pair % 2 == 0 else reversed(arguments.arms):
            seconds[name].append(arms[name].seconds_per_step(arguments.steps))
    figures = {"arms": {}, "parameters": sum(p.numel() for p in model.parameters())}
    for name, arm in arms.items():
        figures["arms"][name] = summarise(name, arm, arms, seconds)
    if dist.get_rank() == 0:
        Path(arguments.output).write_text(json.dumps(figures))
    dist.barrier()


def summarise(name, arm, arms, seconds):
    """Figures of an arm; RuntimeError where it has trained to other weights than its peer."""
    figures = {
        "median_seconds": statistics.median(seconds[name]),
        "min_seconds": min(seconds[name]),
        "bytes_through_bagua_per_step": arm.bytes_per_step(),
        "wire_bytes_per_step": arm.wire_bytes / arm.steps,
    }
    peer = PEERS.get(name)
    if peer in seconds:
        ratios = [a / b for a, b in zip(seconds[peer], seconds[name], strict=True)]
        figures[f"speed_over_{peer}"] = statistics.median(ratios)
        expected = arms[peer].weights()
        error = ((arm.weights() - expected).norm() / expected.norm()).item()
        if not error < 1e-3:
            raise RuntimeError(f"{name}: parameters are {error:.1e} from {peer}'s")
    return figures


def run_rate(arguments, rate):
    """Starts the ranks on a network of that many Mbit/s ("none": loopback); returns the figures."""
    steps = 1 if arguments.quick else 10 if rate == "none" else 2
    options = ["--arms", *arguments.arms, "--pairs", arguments.pairs, "--steps", steps]
    before = os.getloadavg()[0]
    return {"load_before": before, **figures_of(rate, __file__, options, RANKS)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one pair of one step")
    parser.add_argument("--rates", nargs="+", default=["none", "200"], help="Mbit/s or none")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-output", dest="output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output:
        return run_rank(arguments)
    if arguments.quick:
        arguments.pairs = 1
    rates = {}
    for rate in arguments.rates:
        print(f"rate {rate}", file=sys.stderr, flush=True)
        rates[rate] = run_rate(arguments, rate)
    payload = {"machine": machine(), "ranks": RANKS, "rates_mbit": rates}
    print(json.dumps(payload, indent=2))
    if not arguments.quick:
        write_results("bench_fsdp", payload)


if __name__ == "__main__":
    main()
