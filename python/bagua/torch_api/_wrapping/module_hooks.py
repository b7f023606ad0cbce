"""The hooks of a wrapper on its module and its optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from bagua._sync.hooks import WeakHook, optimizer_hooks
from bagua._sync.outside_graphs import outside_graphs
from bagua._sync.wrapper import Wrapper

__all__ = ["install_hooks"]


class Owner(Wrapper, Protocol):
    """The wrapper as this file sees it."""

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None: ...

    def after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None: ...


def install_hooks(
    owner: Owner, settle: Callable[[], None], *, on_forwards: bool
) -> list[RemovableHandle]:
    """Install the hooks; their handles.

    Args:
        settle: a method of ``owner``, called before the module's ``state_dict()``.
        on_forwards: False: the caller calls the wrapper's methods around forwards.
    """
    handles = [owner.module.register_state_dict_pre_hook(WeakHook(settle))]
    if on_forwards:
        handles += [
            owner.module.register_forward_pre_hook(outside_graphs(owner.before_forward)),
            owner.module.register_forward_hook(outside_graphs(owner.after_forward)),
        ]
    return handles + optimizer_hooks(owner)
