"""The demo: trains digits.py with every algorithm and prints what each sent and what it learnt.

    python docs/examples/digits_table.py --seeds 3

Starts torchrun once, with two ranks, for all algorithms and seeds. Writes demo.json (every figure)
and demo.png (loss over steps and over bytes sent), and fails where a row is not what it should be.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ALGORITHMS = ["none", "gradient_allreduce", "bytegrad"]
TITLES = {"none": "no communication", "gradient_allreduce": "exact", "bytegrad": "8 bit (bytegrad)"}
RANKS = 2


def train_all(arguments):
    """What each rank does under torchrun; rank 0 writes the results."""
    import bagua.torch_api as bagua
    from digits import train

    bagua.init_process_group()
    results = [
        train(algorithm, arguments.epochs, seed, show_progress=True)
        for algorithm in ALGORITHMS
        for seed in range(arguments.seeds)
    ]
    if bagua.get_rank() == 0:
        Path(arguments.results).write_text(json.dumps(results))


def summarise(results):
    """algorithm -> mean accuracy over the seeds, median seconds and bytes per step."""
    rows = {}
    for algorithm in ALGORITHMS:
        runs = [run for run in results if run["algorithm"] == algorithm]
        rows[algorithm] = {
            "accuracy": statistics.mean(run["accuracy"] for run in runs),
            "seconds": statistics.median(run["seconds_per_step"] for run in runs),
            "bytes": statistics.mean(run["bytes_sent_per_step"] for run in runs),
            "losses": [
                statistics.mean(step)
                for step in zip(*(r["test_losses"] for r in runs), strict=True)
            ],
        }
    return rows


def print_table(rows, seeds):
    exact_bytes = rows["gradient_allreduce"]["bytes"]
    print(f"\n{RANKS} ranks, each trained on half of the digits; mean of {seeds} seed(s)\n")
    print("| algorithm | test accuracy | time per step | sent per rank and step | ratio to exact |")
    print("|---|---:|---:|---:|---:|")
    for algorithm, row in rows.items():
        print(
            f"| {TITLES[algorithm]} | {row['accuracy']:.1%} | {row['seconds'] * 1e3:.1f} ms "
            f"| {row['bytes'] / 1e6:.4f} MB | {row['bytes'] / exact_bytes:.3f} |"
        )


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over_steps, over_bytes) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for algorithm, row in rows.items():
        steps = range(1, len(row["losses"]) + 1)
        over_steps.plot(steps, row["losses"], label=TITLES[algorithm])
        sent = [row["bytes"] * step / 1e6 for step in steps]
        # An empty line where nothing is sent keeps the colours of both sides equal.
        over_bytes.plot(sent if row["bytes"] else [], row["losses"] if row["bytes"] else [])
    over_steps.set(xlabel="steps", ylabel="loss on held-out digits of all classes", yscale="log")
    over_bytes.set(xlabel="MB sent per rank")
    over_steps.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def find_faults(rows):
    faults = [
        f"{TITLES[algorithm]}: accuracy {rows[algorithm]['accuracy']:.1%} is below 95 %"
        for algorithm in ("gradient_allreduce", "bytegrad")
        if rows[algorithm]["accuracy"] < 0.95
    ]
    if rows["none"]["accuracy"] >= 0.60:
        faults.append(
            f"no communication: accuracy {rows['none']['accuracy']:.1%} is not below 60 %, "
            "so the data of the ranks does not differ enough to show anything"
        )
    ratio = rows["bytegrad"]["bytes"] / rows["gradient_allreduce"]["bytes"]
    if ratio > 0.27:
        faults.append(f"8 bit: sent {ratio:.3f} of the exact run's bytes, more than 0.27")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
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
