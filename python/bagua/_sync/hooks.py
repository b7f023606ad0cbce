"""Hooks that run Python, for algorithms that override them; and the tensors of an output."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bagua._sync.wrapper import Wrapper

__all__ = ["LeftBehind", "WeakHook", "backward_hooks", "optimizer_hooks", "tensors_in"]


class LeftBehind:
    """A hook that copies and files of its module do not have.

    They have a function of the standard library that does nothing, so that files load where this
    package is not installed.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return functools.partial(sys.audit, "bagua.copy")

    def __reduce__(self) -> Any:
        return functools.partial, (sys.audit, "bagua.copy")


class WeakHook(LeftBehind):
    """Calls a method, without arguments, as long as its object lives."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *_: Any) -> None:
        if (method := self._method()) is not None:
            method()


def backward_hooks(ddp: Wrapper) -> list[RemovableHandle]:
    """The algorithm's own backward hook, on every parameter that is trained."""
    this = weakref.ref(ddp)
    handles = []
    for name, parameter in ddp.bagua_build_params():

        def hook(p: Any, name: str = name) -> None:
            owner = this()
            if owner is not None and owner.communicates_in_backward:
                owner.bagua_algorithm.init_backward_hook(owner)(name, p)

        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    return handles


def optimizer_hooks(ddp: Wrapper) -> list[RemovableHandle]:
    """The algorithm's own hook after ``step()``, if it has one, on every optimizer."""
    if not ddp.bagua_algorithm.overrides("init_post_optimizer_step_hook"):
        return []
    this = weakref.ref(ddp)

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        owner = this()
        if owner is not None:
            owner.bagua_algorithm.init_post_optimizer_step_hook(owner)(optimizer)

    return [optimizer.register_step_post_hook(after_step) for optimizer in ddp.bagua_optimizers]


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
