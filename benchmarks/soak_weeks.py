"""A run of weeks in an hour: what 2 ranks hold stays flat over 100,000 steps and 5,000 rounds.

    python benchmarks/soak_weeks.py [--arms exact diloco] [--steps 100000] [--rounds 5000] [--dry]

Trains the smallest model with each algorithm, one after the other, DiLoCo for so many rounds.
Memory that only rank 0 has, its threads and descriptors, the keys of the store and the time that a
tenth of the steps are faster than are taken 40 times. The least of each in the last quarter of the
run may not be more than that in the second one, but for NOISE. Ends with status 1 if it is. The
table goes to build/benchmarks/soak_weeks.json, unless `--dry`.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bench_start import algorithms, held
from common import machine, write_results
from rank_processes import figures_of
from torch import nn

#: How much the last quarter may have more than the second one: a part of it, and so many.
NOISE = {
    "mib": (0.0, 2.0),
    "threads": (0.0, 0.0),
    "descriptors": (0.0, 0.0),
    "keys": (0.0, 0.0),
    "step_us": (0.5, 100.0),
}
SAMPLES = 40
IN_ROUNDS = {"diloco": 5}  # steps of a round


def train(arm, steps):
    """Samples of this rank: the figures of NOISE, SAMPLES times."""
    bagua.init_process_group()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    algorithm, optimizer = algorithms()[arm](model.parameters())
    model = model.with_bagua([optimizer], algorithm)
    inputs, samples = torch.ones(2, 4), []
    store = dist.distributed_c10d._get_default_store()
    for _ in range(SAMPLES):
        seconds = []
        for _ in range(max(10, steps // SAMPLES)):
            start = time.perf_counter()
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        gc.collect()
        figures = held() | {
            "keys": store.num_keys(),
            "step_us": 1e6 * statistics.quantiles(seconds, n=10)[0],
        }
        samples.append({name: figures[name] for name in NOISE})
    if arm == "async":
        algorithm.abort(model)
    dist.barrier()  # the store ends with rank 0
    bagua.destroy_process_group()
    return samples


def growth(samples):
    """By figure: its least in the second quarter and in the last one, and whether it has grown."""
    quarter = len(samples) // 4
    found = {}
    for name, (part, many) in NOISE.items():
        values = [sample[name] for sample in samples]
        before, after = min(values[quarter : 2 * quarter]), min(values[-quarter:])
        found[name] = (before, after, after > before * (1 + part) + many)
    return found


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    known = list(algorithms())
    parser.add_argument("--arms", nargs="+", choices=known, default=known, metavar="ARM")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5_000, help="of diloco")
    parser.add_argument("--dry", action="store_true", help="leave build/benchmarks alone")
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parse()
    if options.rank_output:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        (arm,) = options.arms
        samples = train(arm, options.steps)
        if os.environ["RANK"] == "0":
            options.rank_output.write_text(json.dumps(samples))
        return 0
    rows, grown = [], []
    for arm in options.arms:
        steps = IN_ROUNDS[arm] * options.rounds if arm in IN_ROUNDS else options.steps
        start = time.monotonic()
        samples = figures_of("none", __file__, ["--arms", arm, "--steps", steps], 2)
        found = growth(samples)
        grown += [f"{arm}: {name}" for name, (_, _, more) in found.items() if more]
        rows.append({"arm": arm, "steps": steps, "seconds": round(time.monotonic() - start)})
        rows[-1] |= {name: [before, after] for name, (before, after, _) in found.items()}
        print(json.dumps(rows[-1]), flush=True)
    print("grown: " + (", ".join(grown) or "nothing"))
    if not options.dry:
        write_results("soak_weeks", {"machine": machine(), "grown": grown, "cases": rows})
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
