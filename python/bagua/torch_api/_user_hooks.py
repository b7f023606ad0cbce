"""Hooks that run Python: only for algorithms that override them."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from bagua import _C
from bagua.torch_api._plan import Plan
from bagua.torch_api.algorithms.base import AlgorithmImpl, WrappedModule, overrides
from bagua.torch_api.tensor import record_of

__all__ = ["backward_hooks", "mark_unused", "optimizer_hooks", "refuse_second_mark"]


class HookOwner(WrappedModule, Protocol):
    """The wrapper of a module, as its hooks see it. They hold it weakly."""

    bagua_algorithm: AlgorithmImpl

    @property
    def synchronising(self) -> bool: ...


def backward_hooks(ddp: HookOwner) -> list[RemovableHandle]:
    """The algorithm's own backward hook, on every parameter that is trained."""
    this = weakref.ref(ddp)
    handles = []
    for name, parameter in ddp.bagua_build_params():

        def hook(p: Any, name: str = name) -> None:
            owner = this()
            if owner is not None and owner.synchronising:
                owner.bagua_algorithm.init_backward_hook(owner)(name, p)

        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    return handles


def mark_unused(ddp: HookOwner, plan: Plan) -> None:
    """Momentum and weights of parameters that backward did not reach answer as they are."""
    tensors = [t for bucket in ddp.bagua_buckets if not bucket.gradients for t in bucket.tensors]
    for tensor in tensors:
        if not plan.engine.marked(plan.slots[record_of(tensor).name]):
            tensor.bagua_mark_communication_ready()  # type: ignore[attr-defined]


def refuse_second_mark(plan: Plan, name: str) -> None:
    """Raise if tensor ``name`` has been marked in the open round.

    Raises:
        BaguaError: it has.
    """
    if plan.engine.round_open and plan.engine.marked(plan.slots[name]):
        raise _C.BaguaError(
            f"tensor '{name}' was marked ready twice in one round, after its bucket may have been "
            "sent; mark each tensor once"
        )


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
