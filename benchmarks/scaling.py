"""Predicts a training step from compute time, bytes and a rate: docs/scaling.md has the formulae.

    python benchmarks/scaling.py --megabytes 440 --compute-ms 180 --gbps 10 --ranks 2 8 64

Prints for each algorithm the milliseconds of a step with exact gradients and how many times as
fast the others are.
"""

import argparse

from bagua._tools.step_cost import ALGORITHMS, Setting, step_seconds


def table(setting: Setting, ranks: list[int]) -> str:
    exact = next(iter(ALGORITHMS))
    lines = ["| algorithm | " + " | ".join(f"{p} ranks" for p in ranks) + " |"]
    lines.append("|---|" + "---:|" * len(ranks))
    for name in ALGORITHMS:
        cells = []
        for p in ranks:
            seconds = step_seconds(name, setting, p)
            ratio = step_seconds(exact, setting, p) / seconds
            cells.append(f"{seconds * 1e3:.0f} ms" if name == exact else f"{ratio:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, required=True, help="of all gradients in f32")
    parser.add_argument("--compute-ms", type=float, required=True, help="a step of one rank alone")
    parser.add_argument("--gbps", type=float, required=True, help="of a rank's link")
    parser.add_argument("--latency-ms", type=float, default=0.05)
    parser.add_argument("--hidden", type=float, default=0.5, help="share of the compute, 0 to 1")
    parser.add_argument("--codec-gbytes", type=float, default=3.0, help="encoded in a second")
    parser.add_argument("--interval", type=int, default=50, help="of diloco")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    given = parser.parse_args()
    setting = Setting(
        compute=given.compute_ms / 1e3,
        bytes=given.megabytes * 1e6,
        rate=given.gbps * 1e9 / 8,
        latency=given.latency_ms / 1e3,
        hidden=given.hidden,
        codec=given.codec_gbytes * 1e9,
        interval=given.interval,
    )
    print(table(setting, given.ranks))


if __name__ == "__main__":
    main()
