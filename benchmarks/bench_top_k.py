"""Speed of the exact selection of the k largest magnitudes, relative to torch.topk.

    python benchmarks/bench_top_k.py [--repeats 11] [--json]

One thread; both take turns within one process. torch.topk gets |x| made in its turn, as its user
has to, and is not asked to sort. Every selection is checked against torch.topk before it is timed.
With --json the results are printed as JSON instead of a table; both keep them under
build/benchmarks/. Exits with 1 if the selection from normal values is slower than torch.topk.
"""

import argparse
import json
import sys

import torch
from bagua import _C
from common import machine, timed_in_turns, write_results

SIZES = (1_000_000, 8_700_000)
RATIOS = (0.001, 0.01, 0.1)
VALUES = {
    "normal": lambda n: torch.randn(n),
    "heavy tails": lambda n: torch.randn(n) ** 5,
    "ascending": lambda n: torch.randn(n).abs().sort().values,
    "zeros": lambda n: torch.zeros(n),
}


def check(x, k):
    """A benchmark of wrong results is worth nothing."""
    indices = _C.top_k(x, k).to(torch.int64)
    if not torch.equal(x[indices].abs().sort().values, torch.topk(x.abs(), k).values.flip(0)):
        raise RuntimeError(f"top_k does not select the {k} largest of {x.numel()}")


def measure(name, n, ratio, repeats):
    torch.manual_seed(0)
    x, k = VALUES[name](n), int(n * ratio)
    check(x, k)
    seconds = timed_in_turns(
        {
            "top_k": lambda: _C.top_k(x, k),
            "torch.topk": lambda: torch.topk(x.abs(), k, sorted=False),
        },
        repeats,
        warmup=1,
    )
    own, torchs = seconds["top_k"], seconds["torch.topk"]
    return {
        "values": name,
        "n": n,
        "k": k,
        "median_s": own["median"],
        "min_s": own["min"],
        "torch_median_s": torchs["median"],
        "torch_min_s": torchs["min"],
        "x_torch": torchs["median"] / own["median"],
        "ns_per_element": own["median"] / n * 1e9,
    }


def show(results):
    print(f"{results['machine']['processor']}, float32, one thread")
    print(f"{'values':14}{'n':>10}{'k':>9}{'median ms':>11}{'ns/elem':>9}{'torch ms':>10}{'x':>8}")
    for row in results["rows"]:
        print(
            f"{row['values']:14}{row['n']:10}{row['k']:9}{row['median_s'] * 1e3:11.2f}"
            f"{row['ns_per_element']:9.2f}{row['torch_median_s'] * 1e3:10.2f}{row['x_torch']:8.1f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(name, n, ratio, arguments.repeats)
        for name in VALUES
        for n in SIZES
        for ratio in RATIOS
    ]
    results = {"machine": machine(), "repeats": arguments.repeats, "rows": rows}
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)
    write_results("bench_top_k", results)
    return int(any(row["x_torch"] < 1 for row in rows if row["values"] == "normal"))


if __name__ == "__main__":
    sys.exit(main())
