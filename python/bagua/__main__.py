"""``python -m bagua``, also installed as the command ``bagua``."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import bagua

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (None: those of the process); returns the exit code.

    Where the package cannot be imported it prints the report without the extension, and the reason,
    whatever the arguments; the exit code is 1.
    """
    if bagua._import_error is not None:
        from bagua._tools.report import report_text

        sys.stdout.write(report_text(bagua._import_error))
        return 1
    return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    from bagua._tools import mailbox, plan, top
    from bagua._tools.doctor import examine
    from bagua._tools.report import report_text

    parser = argparse.ArgumentParser(
        prog="bagua",
        description="Without a command: print versions, processors, network and settings.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("report", help="print versions, processors, network and settings")
    tools: dict[str, Any] = {"doctor": examine, "plan": plan, "top": top, "mailbox": mailbox}
    for name, tool in tools.items():
        command = commands.add_parser(
            name,
            help=tool.SUMMARY,
            description=tool.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        tool.add_arguments(command)
    chosen = parser.parse_args(arguments)
    if chosen.command in tools:
        return int(tools[chosen.command].main(chosen))
    sys.stdout.write(report_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
