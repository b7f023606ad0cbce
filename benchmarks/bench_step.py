"""Seconds per training step against torch DDP, on two ranks, over networks of several speeds.

    python benchmarks/bench_step.py [--quick] [--rates none 1000 200] [--arms compute ddp bytegrad]

Shaped networks are namespaces (network.py) and need root; "none" is the loopback device, unshaped.
All arms run in the same two processes in turn. Prints JSON and keeps it under benchmarks/results/.
"""

import argparse
import json
import sys
from pathlib import Path

from common import machine, write_results
from rank_processes import figures_of
from step_arms import ARMS
from step_measure import measure

RANKS = 2


def run_rank(arguments):
    """Program of each rank; its place in the group is in its environment."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    figures = measure(arguments.arms, arguments.pairs, arguments.steps)
    if dist.get_rank() == 0:
        Path(arguments.output).write_text(json.dumps(figures))
    dist.barrier()


def run_rate(arguments, rate):
    """Starts the ranks on a network of that many Mbit/s ("none": loopback); returns the figures."""
    # The slower the network, the longer a step, and the fewer make a good measurement.
    steps = 2 if arguments.quick else 10 if rate == "none" else max(2, int(rate) // 200)
    options = ["--arms", *arguments.arms, "--pairs", arguments.pairs, "--steps", steps]
    return figures_of(rate, __file__, options, RANKS, arguments.mtu)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one pair, few steps")
    parser.add_argument(
        "--rates", nargs="+", default=["none", "1000", "200"], help="Mbit/s or none"
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--mtu", type=int, default=1500, help="bytes of a packet when shaped")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-output", dest="output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output:
        return run_rank(arguments)
    if arguments.quick:
        arguments.pairs = 1
    rates = {}
    for rate in arguments.rates:
        print(f"rate {rate}", file=sys.stderr, flush=True)
        rates[rate] = run_rate(arguments, rate)
    payload = {"machine": machine(), "ranks": RANKS, "mtu": arguments.mtu, "rates_mbit": rates}
    print(json.dumps(payload, indent=2))
    if not arguments.quick:
        write_results("bench_step", payload)


if __name__ == "__main__":
    main()
