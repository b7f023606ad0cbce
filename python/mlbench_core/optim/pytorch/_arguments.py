"""Arguments that have no default although mlbench-core's signatures give them one."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["needed"]

Value = TypeVar("Value")


def needed(value: Value | None, name: str, owner: str) -> Value:
    """The value.

    Raises:
        ValueError: it is None.
    """
    if value is None:
        raise ValueError(f'"{name}" not set for optimizer {owner}: pass {name}=...')
    return value
