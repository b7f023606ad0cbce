"""Bagua's group in a script that initialises torch.distributed only."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from bagua._core.group.job import destroy_process_group, init_process_group
from bagua._core.group.process_group import BaguaProcessGroup, get_default_group, is_initialized

__all__ = ["ensure_initialised"]


class _Implicit:
    """The default group that was made here, and the torch group that it was made over."""

    bagua: weakref.ref[BaguaProcessGroup] | None = None
    torch: weakref.ref[dist.ProcessGroup] | None = None


def ensure_initialised() -> None:
    """Make bagua's default group over torch.distributed's if there is none. All ranks call it.

    A group that was made here follows torch's: when the script has destroyed that one and
    initialised another, it is made again.

    Raises:
        RuntimeError: neither bagua nor torch.distributed is initialised.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: call torch.distributed.init_process_group() or "
            "bagua.init_process_group() first"
        )
    world = dist.group.WORLD
    assert world is not None
    if is_initialized():
        own = _Implicit.bagua is not None and _Implicit.bagua() is get_default_group()
        outlived = _Implicit.torch is not None and _Implicit.torch() is not world
        if not (own and outlived):
            return
        destroy_process_group()
    init_process_group()
    _Implicit.bagua = weakref.ref(get_default_group())
    _Implicit.torch = weakref.ref(world)
