"""Seconds per training step against torch DDP, over networks of several speeds or on GPUs.

    python benchmarks/bench_step.py [--quick] [--rates none 1000 200] [--arms compute ddp bytegrad]
    python benchmarks/bench_step.py --ranks 8 --rates 50 --width 1024
    python benchmarks/bench_step.py --ranks 32 --ranks-per-link 4 --rates 50 --arms ddp exact_nodes
    python benchmarks/bench_step.py --device cuda [--quick] [--arms ...]

On CPU: two ranks, or as many as are told. Shaped networks are namespaces (network.py) and need
root; "none" is the loopback device, unshaped. Ranks of one link are a node, which exchanges through
shared memory where an arm is of nodes. On CUDA: a rank on each GPU of this machine, over
NCCL. All arms run in the same processes in turn. Prints JSON and keeps it under build/benchmarks/.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from codec_on_cuda import hardware
from common import machine, write_results
from rank_processes import figures_of
from step_arms import ARMS
from step_measure import measure

OF_ONE_LINK = [name for name in ARMS if not name.endswith("_nodes")]


def run_rank(arguments):
    """Program of each rank; its place in the group is in its environment."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    counts = arguments.pairs, arguments.steps
    figures = measure(arguments.arms, *counts, device, arguments.width, arguments.pause)
    if dist.get_rank() == 0:
        Path(arguments.output).write_text(json.dumps(figures))
    dist.barrier()


def run_rate(arguments, rate):
    """Starts the ranks on a network of that many Mbit/s ("none": loopback); returns the figures."""
    # The slower the network, the longer a step, and the fewer make a good measurement.
    steps = 2 if arguments.quick else 10 if rate == "none" else max(2, int(rate) // 200)
    options = ["--arms", *arguments.arms, "--pairs", arguments.pairs, "--steps", steps]
    options += ["--device", arguments.device, "--width", arguments.width]
    network = {"mtu": arguments.mtu, "ranks_per_link": arguments.ranks_per_link}
    return figures_of(rate, __file__, options, arguments.ranks, **network)


def of_device(arguments):
    """How many ranks there are on it, and what to say of it in the results."""
    if arguments.device == "cpu":
        return arguments.ranks, {"machine": machine()}
    import torch

    if torch.cuda.device_count() < 2:
        sys.exit(
            f"bench_step --device cuda: {torch.cuda.device_count()} GPU(s) (torch "
            f"{torch.__version__}); NCCL takes one rank on each, and a step needs two."
        )
    return torch.cuda.device_count(), {"machine": machine(), "gpu": hardware()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="one pair, few steps")
    parser.add_argument(
        "--rates", nargs="+", default=["none", "1000", "200"], help="Mbit/s or none"
    )
    parser.add_argument("--arms", nargs="+", default=OF_ONE_LINK, choices=list(ARMS))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--mtu", type=int, default=1500, help="bytes of a packet when shaped")
    parser.add_argument("--ranks", type=int, default=2, help="on CPU")
    parser.add_argument("--ranks-per-link", type=int, default=1, help="as one node, on CPU")
    parser.add_argument("--width", type=int, default=2048, help="of the model")
    parser.add_argument("--pause", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-output", dest="output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output:
        return run_rank(arguments)
    if arguments.ranks < 2:
        parser.error(f"--ranks {arguments.ranks}: a step beside DDP needs two ranks or more")
    arguments.ranks, identity = of_device(arguments)
    if arguments.quick:
        arguments.pairs = 1
    rates = {}
    for rate in arguments.rates if arguments.device == "cpu" else ["none"]:
        print(f"rate {rate}", file=sys.stderr, flush=True)
        rates[rate] = run_rate(arguments, rate)
    shape = {name: getattr(arguments, name) for name in ("ranks", "ranks_per_link", "mtu")}
    payload = {**identity, **shape, "rates_mbit": rates}
    print(json.dumps(payload, indent=2))
    if not arguments.quick:
        write_results("bench_step" + "_cuda" * (arguments.device == "cuda"), payload)


if __name__ == "__main__":
    main()
