"""Seconds and bytes of one call of every aggregation of mlbench_core, on two ranks.

    python benchmarks/bench_aggregation.py [--quick] [--rates none 200] [--repeats 7]

The gradients are those of bench_step's model, 8.7 million f32 numbers in one call, by model. All
aggregations take turns in the same two processes; torch.distributed.all_reduce of one flat tensor
of as many numbers is the measure. Prints JSON and keeps it under build/benchmarks/.
AllReduceAggregationHVD is measured where Horovod is installed (`make horovod`), on loopback only:
one machine's namespaces do not look like two to Horovod.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

from common import machine, write_results
from rank_processes import figures_of

RANKS = 2


def aggregations(model, with_horovod):
    """name -> function that aggregates the model's gradients, and the object that counts."""
    from mlbench_core.aggregation.pytorch.centralized import (
        AllReduceAggregation,
        AllReduceAggregationHVD,
        PowerAggregation,
        SparsifiedAggregation,
    )
    from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
    from torch import distributed as dist

    rank = dist.get_rank()
    made = {
        "AllReduceAggregation": AllReduceAggregation(RANKS),
        "SparsifiedAggregation, 1 %": SparsifiedAggregation(model, ratio=0.01),
        "PowerAggregation, rank 1": PowerAggregation(model, reuse_query=True, rank=1),
        "PowerAggregation, rank 4": PowerAggregation(model, reuse_query=True, rank=4),
        "DecentralizedAggregation, ring": DecentralizedAggregation(rank, [1 - rank]),
    }
    if with_horovod and importlib.util.find_spec("horovod") is not None:
        made["AllReduceAggregationHVD"] = AllReduceAggregationHVD(RANKS)
    return made


def run_rank(arguments):
    """Program of each rank; its place in the group is in its environment."""
    import torch
    import torch.distributed as dist
    from step_arms import make_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = make_model()
    numel = sum(parameter.numel() for parameter in model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradients = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
    flat = torch.zeros(numel)
    calls = {"torch.distributed.all_reduce": lambda: dist.all_reduce(flat)}
    made = aggregations(model, not arguments.without_horovod)
    for name, aggregation in made.items():
        calls[name] = lambda a=aggregation: a.agg_grad()(model, "avg_world")
    seconds = {name: [] for name in calls}
    for repeat in range(arguments.repeats + 1):
        for name, call in calls.items():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            dist.barrier()
            start = time.perf_counter()
            call()
            if repeat > 0:  # the first one connects
                seconds[name].append(time.perf_counter() - start)
            if not all(parameter.grad.isfinite().all() for parameter in model.parameters()):
                raise RuntimeError(f"{name}: gradients are not finite")
    sent = {name: a.traffic()["bytes_sent"] / (arguments.repeats + 1) for name, a in made.items()}
    sent["torch.distributed.all_reduce"] = 2 * 4 * numel * (RANKS - 1) / RANKS
    peer = seconds["torch.distributed.all_reduce"]
    figures = {
        name: {
            "median_seconds": statistics.median(own),
            "min_seconds": min(own),
            "speed_over_all_reduce": statistics.median(
                p / o for p, o in zip(peer, own, strict=True)
            ),
            "bytes_sent_per_call": sent[name],
        }
        for name, own in seconds.items()
    }
    if dist.get_rank() == 0:
        Path(arguments.output).write_text(json.dumps(figures))
    dist.barrier()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--rates", nargs="+", default=["none", "200"], help="Mbit/s or none")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rank-output", dest="output", help=argparse.SUPPRESS)
    parser.add_argument("--without-horovod", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output:
        return run_rank(arguments)
    repeats = 1 if arguments.quick else arguments.repeats
    rates = {}
    for rate in arguments.rates:
        print(f"rate {rate}", file=sys.stderr, flush=True)
        options = ["--repeats", repeats, *([] if rate == "none" else ["--without-horovod"])]
        rates[rate] = figures_of(rate, __file__, options, RANKS)
    payload = {"machine": machine(), "ranks": RANKS, "repeats": repeats, "rates_mbit": rates}
    print(json.dumps(payload, indent=2))
    if not arguments.quick:
        write_results("bench_aggregation", payload)


if __name__ == "__main__":
    main()
