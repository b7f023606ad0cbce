"""A module's inputs, moved to its device."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

__all__ = ["to_device"]

T = TypeVar("T")


def to_device(value: T, device: torch.device) -> T:
    """``value`` with all tensors in nested tuples, named tuples, lists and dicts on ``device``."""
    moved: Any = value
    if isinstance(value, torch.Tensor):
        moved = value.to(device, non_blocking=True)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        moved = type(value)(*(to_device(item, device) for item in value))
    elif isinstance(value, (tuple, list)):
        moved = type(value)(to_device(item, device) for item in value)
    elif isinstance(value, dict):
        moved = {key: to_device(item, device) for key, item in value.items()}
        moved = moved if type(value) is dict else type(value)(moved)
    return moved  # type: ignore[no-any-return]
