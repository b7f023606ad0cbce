"""Arguments of the command ``bagua``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bagua._tools.doctor import examine
from bagua._tools.report import report_text
from bagua._tools.simulate import profile, simulate
from bagua._tools.top import screen

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (None: those of the process); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="bagua",
        description="Without a command: print versions, processors, network and settings.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("report", help="print versions, processors, network and settings")
    doctor = commands.add_parser(
        "doctor",
        help="check the links between the ranks of a job; started by torchrun",
        description=examine.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    examine.add_arguments(doctor)
    top = commands.add_parser(
        "top",
        help="show a running job, rank by rank",
        description=screen.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    screen.add_arguments(top)
    profiling = commands.add_parser(
        "profile",
        help="run a training script until its profile is measured",
        description=profile.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    profile.add_arguments(profiling)
    simulation = commands.add_parser(
        "simulate",
        help="predict steps for other numbers of ranks and other links",
        description=simulate.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    simulate.add_arguments(simulation)
    chosen = parser.parse_args(arguments)
    if chosen.command == "doctor":
        return examine.main(chosen)
    if chosen.command == "top":
        return screen.main(chosen)
    if chosen.command == "profile":
        return profile.main(chosen)
    if chosen.command == "simulate":
        return simulate.main(chosen)
    sys.stdout.write(report_text())
    return 0
