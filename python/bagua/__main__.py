"""``python -m bagua``, also installed as the command ``bagua``."""

import sys

from bagua._tools.command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
