"""``python -m bagua``, also installed as the command ``bagua``."""

import sys
from collections.abc import Sequence

import bagua

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (None: those of the process); returns the exit code.

    Where the package cannot be imported, as with a torch that it was not built for, it prints the
    report without the extension, and the reason, whatever the arguments; the exit code is 1.
    """
    if bagua._import_error is not None:
        from bagua._tools.report import report_text

        sys.stdout.write(report_text(bagua._import_error))
        return 1
    from bagua._tools import command

    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
