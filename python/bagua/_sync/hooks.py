"""Hooks of modules: those that copies do not have, outside of compiled graphs, on outputs."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., None])


class DroppedOnCopy:
    """A hook that is removed when its module is copied or pickled.

    They have a function of the standard library that does nothing, so that files load where this
    package is not installed.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return functools.partial(sys.audit, "bagua.copy")

    def __reduce__(self) -> Any:
        return functools.partial, (sys.audit, "bagua.copy")


class WeakHook(DroppedOnCopy):
    """Calls a method, without arguments, as long as its object lives."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *_: Any) -> None:
        if (method := self._method()) is not None:
            method()


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


def outside_graphs(step: F) -> F:
    """A part of the training step for which torch.compile leaves a graph and comes back."""
    hidden: F = torch.compiler.disable(
        step,
        reason="bagua communicates before and after a forward. For fullgraph=True compile the "
        "module first: bagua.wrap(torch.compile(model, fullgraph=True), ...)",
    )
    return hidden


def outside_graphs_lazily(step: F) -> F:
    """As :func:`outside_graphs`, for decorators: loads torch.compile at the first call only."""
    hidden: F = torch._disable_dynamo(step)  # type: ignore[assignment,attr-defined]
    return hidden
