"""A hook for each ``DistributedDataParallel`` that other code constructs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bagua._core.group import environment as env
from bagua._core.group.warn import warn
from bagua.comm_hooks import Handle, register
from bagua.torch_api.algorithms.base import Algorithm, as_algorithm

_TORCHS = "_bagua_torchs"  # attribute of a replaced constructor: that of torch


@contextlib.contextmanager
def everywhere(
    algorithm: str | Algorithm, *, grad_scaler: torch.amp.GradScaler | None = None
) -> Iterator[list[Handle]]:
    """Call :func:`register` on each ``DistributedDataParallel`` that is constructed inside.

    For libraries that construct torch's class, or a subclass of it, where no argument reaches the
    constructor. ``bagua.torch_api.data_parallel.DistributedDataParallel`` has an algorithm already
    and gets no hook. Every rank enters, in the process that constructs the object. Where contexts
    are nested, the innermost registers. A hook works as long as its object, also after the context.

    Args:
        algorithm: as that of :func:`register`.
        grad_scaler: as that of :func:`register`.

    Yields:
        The handles of the hooks so far, in the order of construction.

    Raises:
        TypeError: ``algorithm`` is something else.
        ValueError: an unknown name of an algorithm.

    The constructor raises what :func:`register` does.

    Example::

        with everywhere("bytegrad") as handles:
            ddp = torch.nn.parallel.DistributedDataParallel(model)  # deep inside a library
        handles[0].stats()["total"]["bytes_sent"]
    """
    algorithm = as_algorithm("comm_hooks.everywhere", algorithm)
    handles: list[Handle] = []
    replaced: Any = DistributedDataParallel
    before: Callable[..., None] = replaced.__init__
    construct = getattr(before, _TORCHS, before)

    @functools.wraps(construct)
    def construct_with_hook(ddp: DistributedDataParallel, *args: Any, **options: Any) -> None:
        construct(ddp, *args, **options)
        handles.append(register(ddp, algorithm, grad_scaler=grad_scaler))

    setattr(construct_with_hook, _TORCHS, construct)
    replaced.__init__ = construct_with_hook
    try:
        yield handles
    finally:
        replaced.__init__ = before
    if not handles and env.get_world_size() > 1:
        warn(
            "comm_hooks.everywhere: no DistributedDataParallel of torch's was constructed inside, "
            "so no gradients are compressed. Enter it before the object is made, in the process "
            "that makes it, or call bagua.comm_hooks.register(ddp, algorithm) on the object",
            RuntimeWarning,
        )
