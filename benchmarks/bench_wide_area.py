"""Seconds per training step against torch DDP between ranks that are far from each other.

    python benchmarks/bench_wide_area.py [--rate 200] [--rtt 80] [--loss 0.1] [--arms ...]
    python benchmarks/bench_wide_area.py --table  # over four links, half an hour

Ranks are network namespaces that tests/support/processes/wide_area.py joins: it needs root,
/dev/net/tun and g++. Every arm of bench_step.py trains in the same processes, in turn.
BAGUA_LANES and other variables reach the ranks. Prints JSON and keeps it under build/benchmarks/.
"""

import argparse
import json
import sys
from pathlib import Path

from common import machine, write_results
from rank_processes import figures_over
from step_arms import ARMS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.processes.wide_area import WideArea, why_unavailable

#: Mbit/s, milliseconds there and back, percent of the packets lost.
LINKS = ((1000, 1, 0), (200, 20, 0.01), (50, 80, 0.1), (20, 150, 1))
STEP = Path(__file__).with_name("bench_step.py")
USUAL = ["compute", "ddp", "gradient_allreduce", "bytegrad", "bytegrad_int4"]
USUAL += ["power_sgd_4", "diloco_int4"]


def measured(arguments):
    """The figures over one link, with what it was like."""
    ends = {"rtt_ms": arguments.rtt, "mbit": arguments.rate or None}
    link = WideArea(arguments.ranks, **ends, congestion=arguments.congestion)
    options = ["--arms", *arguments.arms, "--pairs", arguments.pairs, "--steps", arguments.steps]
    options += ["--width", arguments.width, "--pause", arguments.pause]
    with link:
        link.path("*", "*", loss_percent=arguments.loss, jitter_ms=arguments.jitter)
        figures = figures_over(link, STEP, options)
    names = ("ranks", "rate", "rtt", "loss", "congestion", "width", "pause")
    settings = {name: getattr(arguments, name) for name in names}
    return {"machine": machine(), **settings, "jitter": arguments.jitter, **figures}


def rows_of(found, arms):
    """Markdown: seconds per step, and in brackets how many times as fast as DDP."""
    heads = [f"{each['rate']:g} Mb/s, {each['rtt']:g} ms, {each['loss']:g} %" for each in found]
    rows = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(found)]
    for arm in arms:
        figures = [each["arms"][arm] for each in found]
        cells = [f"{one['median_seconds']:.3f} ({one['speed_over_ddp']:.2f}x)" for one in figures]
        rows.append(f"| {arm} | " + " | ".join(cells) + " |")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=200, help="Mbit/s of each rank; 0: any")
    parser.add_argument("--rtt", type=float, default=80, help="milliseconds, there and back")
    parser.add_argument("--loss", type=float, default=0, help="percent of the packets")
    parser.add_argument(
        "--congestion", help="TCP's control of it, on all machines: cubic, bbr, ..."
    )
    parser.add_argument("--width", type=int, default=2048, help="of the model")
    parser.add_argument("--pause", type=float, default=0, help="seconds of a step, as on a GPU")
    parser.add_argument("--jitter", type=float, default=0, help="milliseconds, each way")
    parser.add_argument("--arms", nargs="+", default=USUAL, choices=list(ARMS))
    parser.add_argument("--pairs", type=int, default=3, help="measurements of each arm")
    parser.add_argument("--steps", type=int, default=4, help="of a measurement")
    parser.add_argument("--table", action="store_true", help="over each of four links")
    parser.add_argument("--quick", action="store_true", help="one measurement of two steps")
    arguments = parser.parse_args()
    if reason := why_unavailable():
        sys.exit(f"bench_wide_area: no wide area: {reason}")
    if arguments.quick:
        arguments.pairs, arguments.steps = 1, 2
    if arguments.table:
        found = []
        for rate, rtt, loss in LINKS:
            arguments.rate, arguments.rtt, arguments.loss = rate, rtt, loss
            found.append(measured(arguments))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        print("\n".join(rows_of(found, arguments.arms)))
        write_results("wide_area_table", {"links": found})
        return
    payload = measured(arguments)
    print(json.dumps(payload, indent=2))
    if not arguments.quick:
        write_results("bench_wide_area", payload)


if __name__ == "__main__":
    main()
