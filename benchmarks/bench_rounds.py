"""Seconds per step of training with outer rounds, on slow networks, against compute alone.

    python benchmarks/bench_rounds.py [--quick] [--rates 200 20] [--ranks 2 4]
    python benchmarks/bench_rounds.py --islands [--quick] [--rates 20]

The transformer of curves.py (0.86 million parameters, AdamW), a round every 50 steps; figures are
means over whole rounds. All ways train in the same processes in turn. Networks are namespaces
(network.py) and need root; "none" is this machine without one. --islands: two of two ranks, in
which FSDP2 shards the model at 400 Mb/s; "compute" is an island that meets nobody. Prints JSON and
keeps it under build/benchmarks/.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from common import machine, write_results
from rank_processes import figures_of

INTERVAL = 50
ISLANDS, RANKS_OF_AN_ISLAND, INSIDE_MBIT = 2, 2, 400
IN_4_BITS = {"codec": "int4_block", "error_feedback": True}
#: Name -> registered name and arguments; None: this rank by itself.
WAYS = {
    "compute": None,
    "ddp": None,
    "bytegrad int4_block, error feedback": ("bytegrad", {**IN_4_BITS, "hierarchical": False}),
    "diloco": ("diloco", {"interval": INTERVAL}),
    "diloco int4_block": ("diloco", {"interval": INTERVAL, **IN_4_BITS}),
    "diloco int4_block, overlap": (
        "diloco",
        {"interval": INTERVAL, "overlap_steps": 10, **IN_4_BITS},
    ),
}
EVERY_STEP = ("ddp", "bytegrad int4_block, error feedback")
WAYS_OF_ISLANDS = ("compute", "diloco int4_block", "diloco int4_block, overlap")


class Training:
    """One way. mesh: of the ranks, ``(island, shard)``; None: no islands."""

    def __init__(self, name, data, mesh=None):
        import torch
        from bagua.torch_api.algorithms import Algorithm
        from curve_tasks import TASKS
        from torch.distributed.fsdp import fully_shard

        self.task, self.data = TASKS["text"], data
        torch.manual_seed(0)
        self.model = self.task.make_model()
        if mesh is not None:
            fully_shard(self.model, mesh=mesh["shard"])
        self.optimizer = self.task.optimizer(self.model.parameters())
        if name == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        elif WAYS[name] is not None:
            algorithm, arguments = WAYS[name]
            self.model.with_bagua(
                [self.optimizer],
                Algorithm.init(algorithm, **arguments),
                process_group=None if mesh is None else mesh["island"],
            )

    def step(self):
        from curve_tasks import loss_of

        inputs, targets = self.data
        self.optimizer.zero_grad()
        loss_of(self.model, inputs[: self.task.batch], targets[: self.task.batch]).backward()
        self.optimizer.step()

    def bytes_sent(self):
        """By this rank; None where nothing counts."""
        stats = getattr(self.model, "bagua_stats", None)
        return stats()["total"]["bytes_sent"] if stats else None


def time_on_rank(arguments):
    """The figures of each way, on rank 0."""
    import bagua.torch_api as bagua
    import torch
    import torch.distributed as dist
    from curve_tasks import text_data

    torch.set_num_threads(1)
    bagua.init_process_group(backend="gloo")
    data = text_data(bagua.get_rank(), bagua.get_world_size())[:2]
    ways, mesh = WAYS, None
    if arguments.islands:
        shape, names = (ISLANDS, RANKS_OF_AN_ISLAND), ("island", "shard")
        ways, mesh = WAYS_OF_ISLANDS, dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    trainings = {name: Training(name, data, mesh) for name in ways}
    for name, training in trainings.items():  # rounds are launched in the middle of a turn
        for _ in range(0 if name in EVERY_STEP else INTERVAL // 2):
            training.step()
    seconds, sent = {name: [] for name in ways}, {}
    for turn in range(1 + arguments.turns):  # the first one warms up
        for name, training in trainings.items():
            steps = arguments.every_step if name in EVERY_STEP else INTERVAL
            dist.barrier()
            before, start = training.bytes_sent(), time.perf_counter()
            for _ in range(steps):
                training.step()
            if turn > 0:
                seconds[name].append((time.perf_counter() - start) / steps)
            if before is not None:
                sent[name] = (training.bytes_sent() - before) / steps
    figures = {}
    for name in ways:
        figures[name] = {
            "seconds_per_step": statistics.median(seconds[name]),
            "to_compute": ratio(seconds[name], seconds["compute"]),
            "bytes_sent_per_step": sent.get(name),
        }
        if "ddp" in ways:
            figures[name]["speed_over_ddp"] = ratio(seconds["ddp"], seconds[name])
    if bagua.get_rank() == 0:
        arguments.rank_output.write_text(json.dumps(figures))
    dist.barrier()


def ratio(above, below):
    """The median of the ratios within a turn."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a first impression")
    parser.add_argument("--islands", action="store_true", help="two, of two ranks each")
    parser.add_argument("--rates", nargs="+", default=["200", "20"], help="Mbit/s or none")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--every-step", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_output:
        return time_on_rank(arguments)
    turns = 1 if arguments.quick else arguments.turns
    result = {"machine": machine(), "interval": INTERVAL, "turns": turns, "networks": {}}
    sizes, kind, links = arguments.ranks, [], {}
    if arguments.islands:
        sizes, kind = [ISLANDS * RANKS_OF_AN_ISLAND], ["--islands"]
        links = {"ranks_per_link": RANKS_OF_AN_ISLAND, "inside": INSIDE_MBIT}
    for rate in arguments.rates:
        steps = INTERVAL if rate == "none" else max(2, int(rate) // 20)
        for ranks in sizes:
            load = os.getloadavg()[0]
            options = ["--turns", turns, "--every-step", steps, *kind]
            figures = figures_of(rate, sys.argv[0], options, ranks, **links)
            result["networks"][f"{rate} Mb/s, {ranks} ranks"] = {"load": load, "ways": figures}
    print(json.dumps(result, indent=2))
    if not arguments.quick:
        write_results("bench_islands" if arguments.islands else "bench_rounds", result)
    return None


if __name__ == "__main__":
    main()
