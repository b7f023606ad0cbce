"""Arguments of the command ``bagua``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from bagua._tools import top
from bagua._tools.doctor import examine
from bagua._tools.report import report_text

__all__ = ["main"]


class _Command(Protocol):
    """A module that holds a command."""

    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def main(self, arguments: argparse.Namespace) -> int: ...


#: Name -> (module, summary), in the order of the help.
_COMMANDS: dict[str, tuple[_Command, str]] = {
    "doctor": (examine, "check the links between the ranks of a job; started by torchrun"),
    "top": (top, "show a running job, rank by rank"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (None: those of the process); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="bagua",
        description="Without a command: print versions, processors, network and settings.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("report", help="print versions, processors, network and settings")
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    chosen = parser.parse_args(arguments)
    if chosen.command in _COMMANDS:
        return _COMMANDS[chosen.command][0].main(chosen)
    sys.stdout.write(report_text())
    return 0
