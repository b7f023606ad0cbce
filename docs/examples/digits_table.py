"""The demo: trains digits.py with every algorithm and prints what each sent and what it learnt.

    python docs/examples/digits_table.py

Starts torchrun once, with two ranks, for all algorithms and seeds. Writes demo.json (every figure)
and demo.png (losses over steps and bytes), and fails where a row is not what it should be.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import bagua.torch_api as bagua
from digits import EVALUATE_EVERY, train

TITLES = {
    "none": "no communication",
    "gradient_allreduce": "exact (gradient_allreduce)",
    "bytegrad": "8-bit gradients (bytegrad)",
    "bytegrad-int4": "4-bit gradients, error feedback (bytegrad)",
    "qadam": "8-bit momentum (qadam)",
    "power_sgd": "rank-4 gradients (power_sgd)",
    "sparse": "1 % of the gradients (sparse)",
    "decentralized": "averaged weights (decentralized)",
    "low_precision_decentralized": "8-bit differences (low_precision_decentralized)",
    "diloco": "outer step every 5 steps (diloco)",
    "async": "averaged asynchronously (async)",
    "auto": "chosen by measuring (auto)",
}
ALGORITHMS = list(TITLES)
RANKS = 2

#: In the picture, with a colour each. The others lie on the line of exact gradients, or near.
DRAWN = {
    "none": "no communication",
    "gradient_allreduce": "exact",
    "bytegrad": "8 bits",
    "bytegrad-int4": "4 bits",
    "diloco": "diloco",
}
COLOURS = ("grey", "black", "tab:blue", "tab:green", "tab:orange")

#: Points of accuracy that an algorithm may lie below the exact one; 1.5 where nothing is said.
ALLOWED_POINTS = {"low_precision_decentralized": 3.0, "async": 3.0}
#: Of the exact run's bytes.
ALLOWED_BYTES = {
    "bytegrad": 0.27,
    "bytegrad-int4": 0.14,
    "qadam": 0.27,
    "low_precision_decentralized": 0.27,
    "power_sgd": 0.07,
    "sparse": 0.02,
    "diloco": 0.21,
}


def train_all(arguments):
    """Program of each rank under torchrun; rank 0 writes the results."""
    bagua.init_process_group()
    results = [
        train(algorithm, arguments.epochs, seed, show_progress=True)
        for algorithm in ALGORITHMS
        for seed in range(arguments.seeds)
    ]
    if bagua.get_rank() == 0:
        Path(arguments.results).write_text(json.dumps(results))


def summarise(results):
    """algorithm -> means over the seeds; median seconds per step."""
    rows = {}
    for algorithm in ALGORITHMS:
        runs = [run for run in results if run["algorithm"] == algorithm]
        rows[algorithm] = {
            key: statistics.mean(run[key] for run in runs)
            for key in ("accuracy", "worst_rank", "bytes_sent_per_step", "compressed_steps")
        }
        rows[algorithm]["choice"] = runs[0]["choice"]
        rows[algorithm]["seconds"] = statistics.median(run["seconds_per_step"] for run in runs)
        rows[algorithm]["losses"] = [
            statistics.mean(step) for step in zip(*(r["test_losses"] for r in runs), strict=True)
        ]
    return rows


def print_table(rows, seeds):
    exact_bytes = rows["gradient_allreduce"]["bytes_sent_per_step"]
    print(f"\n{RANKS} ranks, each trained on half of the digits; mean of {seeds} seed(s).")
    print("Accuracy on all digits: first of the averaged weights, then of the worst single rank.")
    print("Sent: per rank and step, after the warm-up of qadam and async.\n")
    print("| algorithm | averaged weights | worst rank | time per step | sent | ratio to exact |")
    print("|---|---:|---:|---:|---:|---:|")
    for algorithm, row in rows.items():
        sent = row["bytes_sent_per_step"]
        print(
            f"| {TITLES[algorithm]} | {row['accuracy']:.1%} | {row['worst_rank']:.1%} "
            f"| {row['seconds'] * 1e3:.1f} ms | {sent / 1e6:.4f} MB | {sent / exact_bytes:.3f} |"
        )
    print(f"\nQAdam: {rows['qadam']['compressed_steps']:.0%} of its steps ran compressed.")
    choice = rows["auto"]["choice"]
    print(f"auto chose {choice['chosen']}:\n{choice['why']}. Of its candidates:")
    for row in choice["table"]:
        step = "not tried" if row["seconds"] is None else f"{row['seconds'] * 1e3:.2f} ms a step"
        refusal = f" ({row['refusal']})" if row["refusal"] else ""
        print(f"  {row['candidate']}\n    {step}{refusal}")


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over_steps, over_bytes) = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    ends = {over_steps: [], over_bytes: []}  # of its lines: place, name and colour
    for (algorithm, name), colour in zip(DRAWN.items(), COLOURS, strict=True):
        row = rows[algorithm]
        losses = smoothed(row["losses"])
        steps = [EVALUATE_EVERY * (i + 1) for i in range(len(losses))]
        sent = [row["bytes_sent_per_step"] * step / 1e6 for step in steps]
        for axes, places in ((over_steps, steps), (over_bytes, sent)):
            if places[-1] > 0:
                axes.plot(places, losses, color=colour)
                ends[axes].append((places[-1], losses[-1], name, colour))
    over_steps.set(xlabel="steps", ylabel="loss of rank 0's weights on all digits", yscale="log")
    over_steps.margins(y=0.1)
    over_steps.set_xlim(0, 1.4 * max(x for x, *_ in ends[over_steps]))
    over_bytes.set(xlabel="MB sent per rank", xscale="log")
    over_bytes.set_xlim(right=2 * max(x for x, *_ in ends[over_bytes]))
    for axes in ends:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    label_ends(over_steps, ends[over_steps])
    for x, y, name, colour in ends[over_bytes]:  # apart from each other, and beside other lines
        over_bytes.annotate(
            name,
            (x, y),
            xytext=(0, -7),
            textcoords="offset points",
            color=colour,
            va="top",
            ha="right",
        )
    figure.savefig(path, dpi=120)


def smoothed(losses):
    """Means over the last five evaluations."""
    return [statistics.mean(losses[max(0, i - 4) : i + 1]) for i in range(len(losses))]


def label_ends(axes, ends):
    """Names beside the ends of lines of equal length, each above those that end lower."""
    least = 0.0
    for x, y, name, colour in sorted(ends, key=lambda end: end[1]):
        _, height = axes.transData.transform((x, y))
        least = max(least, height)
        _, shown = axes.transData.inverted().transform((0, least))
        axes.annotate(
            name, (x, shown), xytext=(5, 0), textcoords="offset points", color=colour, va="center"
        )
        least += 16  # a line of text, in the picture's dots


def find_faults(rows):
    faults = []
    exact = rows["gradient_allreduce"]
    for algorithm, row in rows.items():
        if algorithm == "none":
            continue
        points = 100 * (exact["accuracy"] - row["accuracy"])
        allowed = ALLOWED_POINTS.get(algorithm, 1.5)
        if row["accuracy"] < 0.95 or points > allowed:
            faults.append(
                f"{TITLES[algorithm]}: accuracy {row['accuracy']:.1%} is below 95 %, or more than "
                f"{allowed} points below the exact one's {exact['accuracy']:.1%}"
            )
    if rows["none"]["accuracy"] >= 0.60:
        faults.append(
            f"no communication: accuracy {rows['none']['accuracy']:.1%} is not below 60 %, "
            "so the data of the ranks does not differ enough to show anything"
        )
    for algorithm, allowed in ALLOWED_BYTES.items():
        ratio = rows[algorithm]["bytes_sent_per_step"] / exact["bytes_sent_per_step"]
        if ratio > allowed:
            faults.append(
                f"{TITLES[algorithm]}: sent {ratio:.3f} of the exact run's bytes, more than "
                f"{allowed}"
            )
    if rows["auto"]["choice"]["turns"] == 0:
        faults.append("auto has not chosen in a whole training")
    if rows["qadam"]["compressed_steps"] < 0.8:
        faults.append(f"qadam compressed {rows['qadam']['compressed_steps']:.0%} of its steps only")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--results", default="demo.json")
    parser.add_argument("--picture", default="demo.png")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # started by the torchrun below
        return train_all(arguments)

    Path(arguments.results).unlink(missing_ok=True)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={RANKS}",
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    status = subprocess.run([*launch, __file__, *sys.argv[1:]], env=environment).returncode
    if status != 0:
        sys.exit(f"demo failed: training ended with status {status}")
    rows = summarise(json.loads(Path(arguments.results).read_text()))
    print_table(rows, arguments.seeds)
    draw(rows, arguments.picture)
    print(f"\nWrote {arguments.picture} and {arguments.results}.")
    faults = find_faults(rows)
    if faults:
        sys.exit("demo failed: " + "; ".join(faults))


if __name__ == "__main__":
    main()
