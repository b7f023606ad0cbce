"""Seconds per training step of a model sharded by torch's FSDP2, with bagua.fsdp and without.

    python benchmarks/bench_fsdp.py [--quick] [--rates none 200] [--pairs 5]
    python benchmarks/bench_fsdp.py --boxes [--quick] [--rates 10] [--pairs 3]

The model is that of bench_step.py; every layer with parameters is a module of FSDP. All arms run in
the same processes in turn. --boxes: two of two ranks, which share the link of their box and have
500 Mb/s inside; a narrow model. Shaped networks need root. Prints JSON and keeps it under
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
from typing import Any, NamedTuple

from common import machine, write_results
from network import NetworkUnavailableError, bytes_on_the_device
from rank_processes import figures_of

RANKS = 2
BOXES, RANKS_OF_A_BOX, INSIDE_MBIT, WIDTH = 2, 2, 500, 256
INTERVAL = 50  # steps of a round
WARM_UP = 2


class Way(NamedTuple):
    """One way to train.

    Attributes:
        options: of ``compress()``; None: it is not called.
        reshard: whether weights are given up after forward.
        copies: whether each box has a copy of the model.
        rounds: whether the copies meet in rounds, in 4 bits, instead of in each step.
        peer: the arm whose weights it must reach.
    """

    options: dict[str, Any] | None = None
    reshard: bool = True
    copies: bool = False
    rounds: bool = False
    peer: str | None = None


FOUR_BITS = {"codec": "int4_block", "error_feedback": True}
ARMS = {
    "fsdp": Way(),
    "gradients": Way({}, peer="fsdp"),
    "gradients_and_weights": Way({"weights": True}, peer="fsdp"),
    "fsdp_kept": Way(reshard=False),
    "gradients_kept": Way({}, reshard=False, peer="fsdp_kept"),
}
ARMS_OF_BOXES = {
    "fsdp": Way(),
    "gradients": Way({}, peer="fsdp"),
    "gradients_and_weights": Way({"weights": True}, peer="fsdp"),
    "hsdp": Way(copies=True, peer="fsdp"),
    "hsdp_8_bits": Way({}, copies=True, peer="fsdp"),
    "hsdp_4_bits": Way(FOUR_BITS, copies=True, peer="fsdp"),
    "islands": Way(copies=True, rounds=True),
}


def bytes_on_the_link():
    """Payload sent so far through the interface of this rank's namespace; 0: no such."""
    try:
        return bytes_on_the_device()
    except NetworkUnavailableError:
        return 0


class Arm:
    """A sharded copy of the model; ``step`` is what is timed."""

    def __init__(self, way, model):
        import bagua.fsdp
        import torch
        import torch.distributed as dist
        from bagua.torch_api.algorithms import DiLoCoAlgorithm
        from step_arms import BATCH, CLASSES, sgd
        from torch.distributed.fsdp import fully_shard

        self.way = way
        self.model = copy.deepcopy(model)
        mesh, of_shards = None, None
        if way.copies:
            shape, names = (BOXES, RANKS_OF_A_BOX), ("box", "shard")
            mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
            of_shards = mesh["shard"] if way.rounds else mesh
        for layer in (*self.model, self.model):
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=of_shards, reshard_after_forward=way.reshard)
        self.handle = None
        if way.options is not None:
            self.handle = bagua.fsdp.compress(self.model, **way.options)
        self.optimizer = sgd(self.model.parameters())
        if way.rounds:
            algorithm = DiLoCoAlgorithm(interval=INTERVAL, codec="int4_block")
            self.model.with_bagua([self.optimizer], algorithm, process_group=mesh["box"])
        self.steps = 0
        self.link_bytes = 0
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn(BATCH, 3, 32, 32, generator=generator)
        self.labels = torch.randint(CLASSES, (BATCH,), generator=generator)

    def step(self):
        from torch.nn.functional import cross_entropy

        self.optimizer.zero_grad()
        cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()
        self.steps += 1

    def measured(self, steps):
        """Mean of the seconds of consecutive steps that all ranks start together.

        Where ranks meet in rounds it takes one whole round instead of ``steps``.
        """
        import torch.distributed as dist

        steps = INTERVAL if self.way.rounds else steps
        dist.barrier()
        before, start = bytes_on_the_link(), time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = (time.perf_counter() - start) / steps
        self.link_bytes += bytes_on_the_link() - before
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
    import bagua.torch_api as bagua
    import torch
    import torch.distributed as dist
    from step_arms import make_model

    torch.set_num_threads(1)
    bagua.init_process_group(backend="gloo")
    torch.manual_seed(0)
    ways, model = (ARMS_OF_BOXES, make_model(WIDTH)) if arguments.boxes else (ARMS, make_model())
    arms = {name: Arm(ways[name], model) for name in arguments.arms}
    for arm in arms.values():
        arm.measured(WARM_UP)
    seconds = {name: [] for name in arms}
    for pair in range(arguments.pairs):
        for name in arguments.arms if pair % 2 == 0 else reversed(arguments.arms):
            seconds[name].append(arms[name].measured(arguments.steps))
    numel = sum(p.numel() for p in model.parameters())
    figures = {"ranks": dist.get_world_size(), "parameters": numel, "arms": {}}
    for name in arms:
        figures["arms"][name] = summarise(name, arms, seconds)
    if dist.get_rank() == 0:
        Path(arguments.output).write_text(json.dumps(figures))
    dist.barrier()


def summarise(name, arms, seconds):
    """Figures of an arm; RuntimeError where it has trained to other weights than its peer."""
    arm = arms[name]
    figures = {
        "median_seconds": statistics.median(seconds[name]),
        "min_seconds": min(seconds[name]),
        "bytes_through_bagua_per_step": arm.bytes_per_step(),
        "link_bytes_per_step": arm.link_bytes / arm.steps,
    }
    if "fsdp" in seconds:
        ratios = [b / a for a, b in zip(seconds["fsdp"], seconds[name], strict=True)]
        figures["to_fsdp"] = statistics.median(ratios)
    peer = arm.way.peer
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
    ranks, links = RANKS, {}
    if arguments.boxes:
        options, ranks = ["--boxes", *options], BOXES * RANKS_OF_A_BOX
        links = {"ranks_per_link": RANKS_OF_A_BOX, "inside": INSIDE_MBIT}
    before = os.getloadavg()[0]
    return {"load_before": before, **figures_of(rate, __file__, options, ranks, **links)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one pair of one step")
    parser.add_argument("--boxes", action="store_true", help="two, of two ranks each")
    parser.add_argument("--rates", nargs="+", help="Mbit/s or none (none 200; with --boxes 10)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS | ARMS_OF_BOXES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-output", dest="output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output:
        return run_rank(arguments)
    arguments.rates = arguments.rates or (["10"] if arguments.boxes else ["none", "200"])
    arguments.arms = arguments.arms or list(ARMS_OF_BOXES if arguments.boxes else ARMS)
    if arguments.quick:
        arguments.pairs = 1
    rates = {}
    for rate in arguments.rates:
        print(f"rate {rate}", file=sys.stderr, flush=True)
        rates[rate] = run_rate(arguments, rate)
    payload = {"machine": machine(), "rates_mbit": rates}
    print(json.dumps(payload, indent=2))
    if not arguments.quick:
        write_results("bench_boxes" if arguments.boxes else "bench_fsdp", payload)


if __name__ == "__main__":
    main()
