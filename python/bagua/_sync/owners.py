"""Records which wrapped modules a parameter belongs to.

A parameter belongs to one wrapped module, or to several that all copy their gradients and all send
them by an algorithm that allows sharing (``shares_parameters``). Other combinations are refused.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from bagua._sync.wrapper import Algorithm

__all__ = ["Owner", "claim", "is_owned", "release"]


class Owner(Protocol):
    """The wrapper of a module."""

    bagua_module_name: str
    gradient_as_bucket_view: bool

    @property
    def bagua_algorithm(self) -> Algorithm: ...

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]: ...


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _of(parameter: torch.Tensor) -> list[weakref.ref[Owner]]:
    owners: list[weakref.ref[Owner]] = _owners.setdefault(parameter, [])
    owners[:] = [owner for owner in owners if owner() is not None]
    return owners


def _shares(owner: Owner) -> bool:
    return owner.bagua_algorithm.shares_parameters and not owner.gradient_as_bucket_view


def claim(owner: Owner) -> None:
    """Register all trained parameters of ``owner``.

    Raises:
        RuntimeError: one belongs to another wrapped module, and one of the two cannot share it.
    """
    named = owner.bagua_build_params()
    for name, parameter in named:
        for other in (reference() for reference in _of(parameter)):
            if other is None or (_shares(owner) and _shares(other)):
                continue
            raise RuntimeError(
                f"module '{owner.bagua_module_name}': parameter '{name}' belongs to module "
                f"'{other.bagua_module_name}' too, which is wrapped already. Wrap one module that "
                "contains both; or wrap both with copied gradients, which share a parameter "
                "(with_bagua(do_flatten=False), or DistributedDataParallel as it is), with "
                "gradient_allreduce or bytegrad."
            )
    for _, parameter in named:
        _of(parameter).append(weakref.ref(owner))


def release(owner: Owner) -> None:
    """Forget what :func:`claim` has registered. Idempotent."""
    for references in list(_owners.values()):
        references[:] = [r for r in references if r() not in (None, owner)]


def is_owned(parameter: torch.Tensor) -> bool:
    """Whether the parameter belongs to a wrapped module."""
    return bool(_of(parameter))
