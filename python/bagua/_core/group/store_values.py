"""Values that another rank puts in the store: waited for, and checked before use.

Something else than what is expected raises BaguaError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from torch.distributed import distributed_c10d as c10d

from bagua import _C

__all__ = ["stored_lines", "stored_number", "stored_value", "wait_for_keys"]

Value = TypeVar("Value")

# Limit of a description, which has a line per parameter.
_MOST_BYTES = 256 * 1024**2
_PAUSES = 0.0005, 0.02  # seconds from one look at the store to the next: the first, the longest


def wait_for_keys(
    store: c10d.Store,
    keys: Sequence[str],
    timeout: timedelta,
    hopeless: Callable[[], str] | None = None,
) -> None:
    """Return once the store has all ``keys``.

    Between its looks Ctrl-C ends it, and others may use the store's connection, which
    ``store.wait`` would keep to itself.

    Args:
        hopeless: the reason for which the keys will never be there; empty: there is none.

    Raises:
        BaguaTimeoutError: they are not there in time; names them.
        BaguaError: it is hopeless.
    """
    pause, deadline = _PAUSES[0], time.monotonic() + timeout.total_seconds()
    while not store.check(list(keys)):
        if hopeless is not None and (reason := hopeless()):
            raise _C.BaguaError(reason)
        if time.monotonic() > deadline:
            missing = ", ".join(f"'{key}'" for key in keys if not store.check([key]))
            raise _C.BaguaTimeoutError(
                f"within {timeout.total_seconds():g} s the job's store has not got {missing}: a "
                "rank that writes it did not come"
            )
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])


def stored_number(store: c10d.Store, key: str, below: int) -> int:
    """The number from 0 up to, not including, ``below`` that is under ``key``."""
    value = bytes(store.get(key))
    if not (0 < len(value) <= 20 and value.isdigit() and int(value) < below):
        _refuse(key, value, f"no number from 0 to {below - 1}")
    return int(value)


def stored_lines(store: c10d.Store, key: str) -> list[str]:
    """The lines of text, a JSON list, that are under ``key``."""
    value = bytes(store.get(key))
    try:
        lines = json.loads(value) if len(value) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        lines = None
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        _refuse(key, value, "no list of lines")
    return lines


def stored_value(store: c10d.Store, key: str, read: Callable[[Any], Value]) -> Value:
    """Have ``read`` convert the JSON under ``key``; it raises where that is something else."""
    value = bytes(store.get(key))
    try:
        if len(value) <= _MOST_BYTES:
            return read(json.loads(value))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass
    _refuse(key, value, "not of the form that it should be")


def _refuse(key: str, value: bytes, what: str) -> NoReturn:
    raise _C.BaguaError(
        f"the store has {value[:40]!r} ({len(value)} bytes) under '{key}', which is {what}: "
        "something that is no rank of this job has written to it. Keep the store's port "
        "(MASTER_PORT) from others: docs/security.md."
    )
