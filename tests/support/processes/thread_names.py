"""The names of this process's threads, by their numbers, as Linux's /proc has them."""

import contextlib
from pathlib import Path

__all__ = ["thread_names", "threads"]


def threads():
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names


def thread_names():
    return list(threads().values())
