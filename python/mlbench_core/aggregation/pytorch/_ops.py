"""The operations and their names."""

from __future__ import annotations

from typing import Literal

__all__ = ["CanonicalOp", "canonical_op"]

CanonicalOp = Literal["avg_world", "avg_custom", "sum", "min", "max"]

_NAMES: dict[str, CanonicalOp] = {
    "avg_world": "avg_world",
    "avg": "avg_world",
    "avg_custom": "avg_custom",
    "custom_avg": "avg_custom",
    "sum": "sum",
    "min": "min",
    "max": "max",
}


def canonical_op(op: str) -> CanonicalOp:
    """The one name of an operation: ``avg`` is ``avg_world``, ``custom_avg`` is ``avg_custom``.

    Raises:
        NotImplementedError: there is no such operation.
    """
    if op not in _NAMES:
        raise NotImplementedError(f"op={op!r} is not known; there are {', '.join(_NAMES)}")
    return _NAMES[op]
