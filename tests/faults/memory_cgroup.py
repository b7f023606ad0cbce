"""A memory cgroup, of either version, whose limit a process meets."""

import os
import uuid
from contextlib import suppress
from pathlib import Path

LIMIT = 2**26  # bytes that the process may get beyond those that it has
NAME = "bagua-fault-"
ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
LIMITS = ("memory.limit_in_bytes", "memory.max")  # of version 1, of version 2
SWAPS = ("memory.swappiness", "memory.swap.max")


def make():
    """The folder of a new one, or None where none can be made."""
    for root, limit, swap in zip(ROOTS, LIMITS, SWAPS, strict=True):
        folder = root / f"{NAME}{uuid.uuid4().hex[:8]}"
        with suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(LIMIT))
                with suppress(OSError):
                    (folder / swap).write_text("0")
                return folder
            except OSError:
                folder.rmdir()
    return None


def can_be_made():
    folder = make()
    if folder is not None:
        folder.rmdir()
    return folder is not None


def fill(folder):
    """Take more memory than the cgroup lets this process have: the kernel kills it."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    return bytearray(os.urandom(2**20)) * (4 * LIMIT // 2**20)


def remove_empty():
    """Remove those whose processes have ended."""
    for root in ROOTS:
        for folder in root.glob(f"{NAME}*"):
            with suppress(OSError):  # of another job
                folder.rmdir()
