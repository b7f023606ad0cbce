"""Work that each op gives to a device in a round, counted without a GPU.

    python benchmarks/count_device_work.py [--ranks 2 4 8] [--mib 10] [--json]

Launches, calls of the communicator, host waits, and bytes read and written per element of a float32
bucket, or of the rank's own part of it. tests/support/programs/device_work.py says what counts.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.programs.device_work import device_work


def show(rows):
    print(f"{'op':44}{'ranks':>6}{'launches':>9}{'transfers':>10}{'waits':>6}{'B/element':>11}")
    for row in rows:
        print(
            f"{row['op']:44}{row['ranks']:6}{row['launches']:9}{row['transfers']:10}"
            f"{row['waits']:6}{row['read'] + row['written']:11.1f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--mib", type=float, default=10, help="size of the bucket")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rows = device_work(arguments.ranks, int(arguments.mib * 2**20) // 4)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        show(rows)


if __name__ == "__main__":
    main()
