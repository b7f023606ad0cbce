"""Arguments that have no default although mlbench-core's signatures give them one."""

from __future__ import annotations

from typing import TypeVar

from mlbench_core.aggregation.pytorch.centralized import AVG_CUSTOM, AVG_WORLD

__all__ = ["chosen_average", "needed"]

Value = TypeVar("Value")


def needed(value: Value | None, name: str, owner: str) -> Value:
    """The value.

    Raises:
        ValueError: it is None.
    """
    if value is None:
        raise ValueError(f'"{name}" not set for optimizer {owner}: pass {name}=...')
    return value


def chosen_average(average_world: bool, average_custom: bool, owner: str) -> str:
    """``AVG_WORLD`` or ``AVG_CUSTOM``.

    Raises:
        NotImplementedError: neither is chosen.
    """
    if not (average_world or average_custom):
        raise NotImplementedError(
            f"choose how {owner} averages: average_world=True divides by the number of ranks, "
            "average_custom=True by the denom of each step"
        )
    return AVG_WORLD if average_world else AVG_CUSTOM
