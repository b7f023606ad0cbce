"""The package's own arms beside adamw_compressors.py: two ranks, the same task and the same seeds.

    python benchmarks/adamw_package.py [--arms exact ...] [--steps 800] [--seeds 0 1 2] [--small]
        [--seconds 120]

Results go to the same results/adamw_compressors.json; what is there is not made again. No run
begins after --seconds.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RESULTS, machine
from curve_tasks import TASKS, Task, Transformer
from rank_processes import run_on

RANKS = 2
TABLES = ["symbol.*", "place.*", "head.*"]


def arms(steps: int) -> dict[str, Any]:
    """Name -> (task, parameters) -> (optimizer, algorithm)."""
    from bagua.torch_api.algorithms import (
        Algorithm,
        PowerSGDAlgorithm,
        QAdamAlgorithm,
        QAdamOptimizer,
        SparseAlgorithm,
    )
    from curve_runs import registered

    frozen_from = steps * 15 // 100

    def optimizer_of(task: Task, parameters: Any, settled: bool) -> Any:
        return QAdamOptimizer(
            parameters, warmup_steps=frozen_from, freeze_bias_correction=settled, **task.qadam
        )

    def momenta(settled: bool = False, **arguments: Any) -> Any:
        """Compressed momentum; settled: the optimizer's bias correction is frozen."""

        def choose(task: Task, parameters: Any) -> tuple[Any, Any]:
            optimizer = optimizer_of(task, parameters, settled)
            return optimizer, QAdamAlgorithm(optimizer, **arguments)

        return choose

    def frozen(name: str, settled: bool, **arguments: Any) -> Any:
        """The optimizer of qadam on averaged gradients; settled: its bias correction is frozen."""

        def choose(task: Task, parameters: Any) -> tuple[Any, Any]:
            optimizer = optimizer_of(task, parameters, settled)
            return optimizer, Algorithm.init(name, warmup_steps=frozen_from, **arguments)

        return choose

    coarse = {"ratio": 0.02, "codec": "int4_block"}
    warm_up = {"warmup_steps": steps // 10}
    return {
        "exact": registered("gradient_allreduce"),
        "power": registered("power_sgd", rank=4),
        "power, tables exact, warm-up": registered(
            "power_sgd", rank=4, exact_parameters=TABLES, **warm_up
        ),
        "power, v frozen": frozen("power_sgd", False, rank=4),
        "power, settled": frozen("power_sgd", True, rank=4),
        "power, momenta": momenta(compression=PowerSGDAlgorithm(4)),
        "sparse": registered("sparse", ratio=0.01),
        "sparse, updates, 4 bits": registered("sparse", of="updates", **coarse),
        "sparse, updates, 4 bits, warm-up": registered("sparse", of="updates", **coarse, **warm_up),
        "sparse, 4 bits, v frozen": frozen("sparse", False, **coarse),
        "sparse, 4 bits, settled": frozen("sparse", True, **coarse),
        "sparse, momenta, 4 bits": momenta(compression=SparseAlgorithm(**coarse)),
        "sparse, corrected momenta, 4 bits, settled": momenta(
            True, compression=SparseAlgorithm(**coarse), momentum_correction=True
        ),
        "sparse, corrected momenta, 1 %, settled": momenta(
            True, compression=SparseAlgorithm(0.01), momentum_correction=True
        ),
    }


def run_rank(arguments: argparse.Namespace) -> None:
    """Program of each rank."""
    import bagua.torch_api as bagua
    import torch
    import torch.distributed as dist
    from curve_runs import ARMS, curve

    torch.set_num_threads(1)
    bagua.init_process_group(backend="gloo")
    until, task = time.monotonic() + arguments.seconds, TASKS["text"]
    if arguments.small:
        task = replace(task, make_model=lambda: Transformer(64, 2))
    numel = sum(parameter.numel() for parameter in task.make_model().parameters())
    made = arms(arguments.steps)
    ARMS.update(made)
    data = task.data(bagua.get_rank(), RANKS)
    for seed in arguments.seeds:
        for arm in arguments.arms or made:
            size = "0.14 M" if arguments.small else "0.87 M"
            key = f"{arm} | {size} | {arguments.steps} steps | seed {seed} | package"
            kept: dict[str, Any] = {"machine": machine(), "runs": {}}
            if arguments.results.exists():
                kept = json.loads(arguments.results.read_text())
            due = torch.tensor(int(key not in kept["runs"] and time.monotonic() < until))
            dist.broadcast(due, 0)  # rank 0's clock and file decide
            if not due:
                continue
            began = time.perf_counter()
            figures = curve(task, arm, seed, data, arguments.steps, 2)
            if bagua.get_rank() == 0:
                kept["runs"][key] = {
                    "loss": {
                        str(step): round(loss, 4)
                        for step, loss in zip(figures["step"], figures["loss"], strict=True)
                    },
                    "bytes": round(figures["bytes"][-1] / arguments.steps / (4 * numel), 4),
                    "seconds": round(time.perf_counter() - began, 1),
                }
                arguments.results.write_text(json.dumps(kept, indent=1) + "\n")
                print(key, kept["runs"][key], flush=True)
    bagua.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", help="default: all")
    parser.add_argument("--steps", type=int, default=TASKS["text"].steps)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--small", action="store_true", help="2 layers of width 64")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=RESULTS / "adamw_compressors.json")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return run_rank(arguments)
    run_on("none", [sys.executable, __file__, "--rank", *sys.argv[1:]], RANKS)


if __name__ == "__main__":
    main()
