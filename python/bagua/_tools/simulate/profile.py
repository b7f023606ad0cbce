"""``bagua profile``: runs a training script until its profile is measured."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from bagua._foresight.probe import recorder

__all__ = ["DESCRIPTION", "add_arguments", "main"]

DESCRIPTION = """\
Runs a training script and writes a profile of its first module after
with_bagua, then ends it:

  bagua profile train.py --epochs 1                             # one rank
  torchrun --nproc-per-node 2 -m bagua profile train.py         # links, too

The script makes some fifteen steps. A profile of one rank assumes a link of
10 Gbit/s: give bagua simulate your own. With BAGUA_PROFILE=FILE in the
environment any training writes its profile, and goes on.
"""

#: Where a launcher has set nothing: one rank by itself.
_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bagua profile``."""
    parser.add_argument(
        "--output", type=Path, default=Path("profile.json"), metavar="FILE", help="(profile.json)"
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def main(arguments: argparse.Namespace) -> int:
    """Run the script; returns the exit code: 0 the profile is written, 1 there is none, 2 no file.

    What the script raises, SystemExit with an error included, passes through.
    """
    script: Path = arguments.script
    if not script.is_file():
        sys.stderr.write(f"bagua profile: {script}: no such file\n")
        return 2
    if "RANK" not in os.environ:
        from bagua._core.group.environment import find_free_network_port

        os.environ.update(_ALONE, MASTER_PORT=str(find_free_network_port()))
    os.environ["BAGUA_PROFILE"] = str(arguments.output)
    recorder.end_when_done()
    sys.argv[:] = [str(script), *arguments.arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except recorder.ProfileMeasured:
        if os.environ["RANK"] == "0":
            sys.stdout.write(f"profile: {arguments.output}\n")
        return 0
    sys.stderr.write(
        f"bagua profile: {script} ended before its profile was measured: it needs a module after "
        "with_bagua, and some fifteen steps\n"
    )
    return 1
