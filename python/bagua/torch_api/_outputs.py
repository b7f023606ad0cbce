"""The tensors in whatever a module's forward returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["tensors_in"]


def tensors_in(output: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (list, tuple)):
        items = list(output)
    elif isinstance(output, Mapping):
        items = list(output.values())
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        items = [getattr(output, field.name) for field in dataclasses.fields(output)]
    else:
        return []
    return [tensor for item in items for tensor in tensors_in(item)]
