"""Loss of a model sharded by torch's FSDP2 whose gradients, or weights too, are sent compressed.

    python benchmarks/curve_fsdp.py [--task digits] [--ranks 2] [--seeds 0 1 2] [--steps 300]

A task of curves.py. Held-out loss of the exact shards, as a checkpoint has them, and of the
weights that a forward gathers. Prints JSON and keeps it under build/benchmarks/.
"""

import argparse
import copy
import json
import statistics
from pathlib import Path

import torch
from common import machine, write_results
from curve_runs import Training, curve
from curve_tasks import TASKS, evaluate
from rank_processes import figures_of
from torch import nn
from torch.distributed.fsdp import fully_shard

LAYERS = (nn.TransformerEncoderLayer, nn.Conv2d)
HELD_OUT = 1000  # windows
#: Arguments of compress(); None: it is not called.
ARMS = {
    "exact": None,
    "8-bit gradients": {},
    "8-bit weights": {"weights": True, "reduce_scatter": False},
    "8-bit gradients and weights": {"weights": True},
    "4-bit gradients and weights": {
        "codec": "int4_block",
        "weights": True,
        "error_feedback": True,
    },
}


class Sharded(Training):
    """A training whose model FSDP2 has sharded, a module per layer."""

    def wrap(self):
        import bagua.fsdp

        self.plain = copy.deepcopy(self.model)
        for module in list(self.model.modules()):
            if isinstance(module, LAYERS):
                fully_shard(module)
        fully_shard(self.model)
        options = ARMS[self.arm]
        self.handle = None if options is None else bagua.fsdp.compress(self.model, **options)
        return self.task.optimizer(self.model.parameters())

    def bytes_sent(self):
        return 0 if self.handle is None else self.handle.stats()["total"]["bytes_sent"]

    def measure(self):
        """(loss of the shards, loss of what a forward gathers)"""
        held_out = (self.test_inputs[:HELD_OUT], self.test_targets[:HELD_OUT])
        gathered, _ = evaluate(self.model, *held_out)
        self.model.reshard()  # the root keeps what a forward has gathered
        with torch.no_grad():
            for own, shard in zip(self.plain.parameters(), self.model.parameters(), strict=True):
                own.copy_(shard.full_tensor())
        return evaluate(self.plain, *held_out)[0], gathered


def run_rank(arguments):
    """Program of each rank: losses by arm and seed."""
    import bagua.torch_api as bagua

    torch.set_num_threads(1)
    bagua.init_process_group(backend="gloo")
    task = TASKS[arguments.task]
    data = task.data(bagua.get_rank(), bagua.get_world_size())
    figures = {}
    for arm in arguments.arms:
        runs = [
            curve(task, arm, seed, data, arguments.steps, 1, Sharded) for seed in arguments.seeds
        ]
        figures[arm] = {
            name: [run[key][-1] for run in runs]
            for name, key in (("shards", "loss"), ("gathered", "accuracy"))
        }
        if bagua.get_rank() == 0:
            exact = figures.get("exact", figures[arm])["shards"]
            for name in ("shards", "gathered"):
                pairs = zip(figures[arm][name], exact, strict=True)
                gaps = [own - other for own, other in pairs]
                figures[arm][f"{name} above"] = (min(gaps), statistics.mean(gaps), max(gaps))
            print(arm, figures[arm], flush=True)
            arguments.rank_output.write_text(json.dumps(figures))
    bagua.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="text", choices=list(TASKS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_output:
        return run_rank(arguments)
    options = ["--task", arguments.task]
    options += ["--steps", arguments.steps, "--seeds", *arguments.seeds, "--arms", *arguments.arms]
    result = {"machine": machine(), "task": arguments.task, "steps": arguments.steps}
    result["arms"] = figures_of("none", __file__, options, arguments.ranks)
    print(json.dumps(result, indent=2))
    write_results("curve_fsdp", result)
    return None


if __name__ == "__main__":
    main()
