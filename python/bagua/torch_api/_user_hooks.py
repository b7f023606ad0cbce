"""Hooks that run Python: only for algorithms that override them."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from bagua.torch_api.algorithms.base import AlgorithmImpl, WrappedModule, overrides

__all__ = ["HookOwner", "backward_hooks", "optimizer_hooks"]


class HookOwner(WrappedModule, Protocol):
    """The wrapper of a module, as its hooks see it. They hold it weakly."""

    bagua_algorithm: AlgorithmImpl

    @property
    def module(self) -> torch.nn.Module: ...

    @property
    def communicates_in_backward(self) -> bool: ...


def backward_hooks(ddp: HookOwner) -> list[RemovableHandle]:
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


def optimizer_hooks(ddp: HookOwner) -> list[RemovableHandle]:
    """The algorithm's own hook after ``step()``, if it has one, on every optimizer."""
    if not overrides(ddp.bagua_algorithm, "init_post_optimizer_step_hook"):
        return []
    this = weakref.ref(ddp)

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        owner = this()
        if owner is not None:
            owner.bagua_algorithm.init_post_optimizer_step_hook(owner)(optimizer)

    return [optimizer.register_step_post_hook(after_step) for optimizer in ddp.bagua_optimizers]
