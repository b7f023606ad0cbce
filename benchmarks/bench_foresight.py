"""Predicted against measured steps of all algorithms, on networks of several speeds and ranks.

    python benchmarks/bench_foresight.py [--quick] [--rates none 1000 200] [--ranks 2 3 4]

A prediction starts from figures of what never communicates as a training does. Those of the ranks
are measured without a network: readiness of gradients, copies, codecs and selections, on as many
ranks at the same time, as ranks that share two cores slow each other down. Those of the link are
its latency, bandwidth, overhead and use of cores. Compute alone is measured in turn with the arms.
Shaped networks are namespaces (network.py) and need root; "none" is memory that the ranks share.
Prints a table and keeps figures under build/benchmarks/; --figures FILE... predicts again from
such files, without measuring.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from common import RESULTS, machine, write_results
from rank_processes import figures_of


def run_rank(arguments):
    import bagua.torch_api as bagua
    import torch
    from foresight_ranks import measure

    torch.set_num_threads(1)
    bagua.init_process_group()
    figures = measure(arguments.turns, arguments.budget)
    if bagua.get_rank() == 0:
        Path(arguments.output).write_text(json.dumps(figures))
    torch.distributed.barrier()


def profile_of(host, network, ranks):
    """A profile, with a rank's figures from ``host`` and the link's from ``network``."""
    from bagua._foresight.profile import BucketProfile, CodecSpeed, Link, Profile

    own = host["host"]
    compute = network["steps"]["compute"]["seconds"]
    scale = compute / own["compute"]
    buckets = []
    for names, numel, size in host["buckets"]:
        shapes = tuple(matrix_of(host["shapes"][name]) for name in names)
        buckets.append(
            BucketProfile(numel, size, scale * max(own["ready"][n] for n in names), shapes)
        )
    cores = len(os.sched_getaffinity(0)) / ranks
    return Profile(
        ranks=ranks,
        nodes=(1,) * ranks,
        compute=compute,
        optimizer=scale * own["optimizer"],
        buckets=tuple(buckets),
        between=Link(**network["link"]),
        codecs={name: CodecSpeed(*speed) for name, speed in own["codecs"].items()},
        copy=own["copy"],
        speeds=own["speeds"],
        round=network["round"],
        cores=cores,
        spread=own["spread"],
    )


def save_profile(networks):
    """The profile of docs/scaling.md: two ranks of a core each, as nodes with a card of their own.

    gloo's overhead stays; what shaping costs the cores does not, as a card would not need them.
    """
    from bagua._foresight import profile_file
    from bagua._foresight.profile import Link

    shaped = ("1000 Mb/s, 2 ranks", "200 Mb/s, 2 ranks")
    found = [networks[name] for name in shaped if name in networks]
    if not found or "none, 2 ranks" not in networks:
        return
    link = found[0]["link"]
    own = Link(5e-5, 1.25e8, overhead=link["overhead"], per_message=link["per_message"])
    profile = profile_of(networks["none, 2 ranks"], networks["none, 2 ranks"], 2)
    path = RESULTS / "foresight_profile.json"
    profile_file.write_profile(replace(profile, between=own), path)


def matrix_of(shape):
    """Rows and columns as PowerSGD has them."""
    if len(shape) < 2:
        return shape[0], 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0], columns


def predictions(networks):
    """A row of the table for each network and arm."""
    from bagua._foresight.candidate import Candidate
    from bagua._foresight.cost import predict
    from foresight_ranks import ARMS

    rows = []
    for key, network in networks.items():
        rate, ranks = key.split(", ")
        host = networks.get(f"none, {ranks}", network)
        profile = profile_of(host, network, int(ranks.split()[0]))
        for arm in ARMS:
            measured = network["steps"][arm.name]["seconds"]
            found = predict(profile, Candidate(arm.algorithm, arm.arguments))
            rows.append(
                {
                    "network": rate,
                    "ranks": profile.ranks,
                    "arm": arm.name,
                    "measured": measured,
                    "predicted": found.step,
                    "ratio": found.step / measured,
                }
            )
    return rows


def summary(rows):
    errors = [abs(row["ratio"] - 1) for row in rows]
    return {
        "cases": len(rows),
        "within_15_percent": sum(error <= 0.15 for error in errors) / len(rows),
        "within_25_percent": sum(error <= 0.25 for error in errors) / len(rows),
        "smallest_ratio": min(row["ratio"] for row in rows),
        "largest_ratio": max(row["ratio"] for row in rows),
    }


def table(rows):
    networks = list(dict.fromkeys((row["network"], row["ranks"]) for row in rows))
    cells = {(row["network"], row["ranks"], row["arm"]): row for row in rows}
    lines = ["| ms measured, predicted/measured | " + " | ".join(f"{n}, {r}" for n, r in networks)]
    lines.append("|---" * (1 + len(networks)))
    for arm in dict.fromkeys(row["arm"] for row in rows):
        found = [cells[network, ranks, arm] for network, ranks in networks]
        text = [f"{row['measured'] * 1e3:.1f}, {row['ratio']:.2f}" for row in found]
        lines.append(f"| {arm} | " + " | ".join(text))
    return "\n".join(line + " |" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two ranks, one turn")
    parser.add_argument("--rates", nargs="+", default=["none", "1000", "200"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for an arm's steps")
    parser.add_argument("--figures", nargs="+", type=Path, help="of earlier runs: predict only")
    parser.add_argument("--keep", type=Path, help="in place of the usual file")
    parser.add_argument("--write", action="store_true", help="with --figures: keep them, too")
    parser.add_argument("--rank-output", dest="output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output:
        return run_rank(arguments)
    if arguments.figures:
        networks = {}
        for path in arguments.figures:
            networks.update(json.loads(path.read_text())["networks"])
    else:
        if arguments.quick:
            arguments.turns, arguments.ranks = 1, [2]
        networks = {}
        options = ["--turns", arguments.turns, "--budget", arguments.budget]
        for ranks in arguments.ranks:
            for rate in arguments.rates:
                print(f"{rate}, {ranks} ranks", file=sys.stderr, flush=True)
                key = f"{rate if rate == 'none' else rate + ' Mb/s'}, {ranks} ranks"
                networks[key] = figures_of(rate, __file__, options, ranks)
    rows = predictions(networks)
    print(table(rows))
    print(json.dumps(summary(rows), indent=2))
    load = os.getloadavg()[0]
    payload = {"machine": machine(), "load": load, "summary": summary(rows), "rows": rows}
    payload["networks"] = networks
    if arguments.keep:
        arguments.keep.write_text(json.dumps(payload))
    elif arguments.write or not (arguments.quick or arguments.figures):
        write_results("bench_foresight", payload)
        save_profile(networks)
    return None


if __name__ == "__main__":
    main()
