"""Numbers in environment variables, and the process that has started this one."""

import os
import sys
from typing import Any


def parent_process() -> Any:
    """The process from which multiprocessing has started this one, or None."""
    module = sys.modules.get("multiprocessing.process")
    return None if module is None else module.parent_process()


def integer(name: str, default: int) -> int:
    value = os.environ.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"environment variable {name}={value!r} is not an integer") from None
