"""``fuse_optimizer``: torch's own fused and foreach steps, by Bagua's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bagua._core.group.warn import warn

__all__ = ["fuse_optimizer", "is_fused_optimizer"]

_MARK = "_bagua_fused"


def fuse_optimizer(
    optimizer: torch.optim.Optimizer, do_flatten: bool = True, check_flatten: bool = True
) -> torch.optim.Optimizer:
    """Have an optimizer update all its parameters by a few kernels.

    Sets ``fused=True`` of torch's optimizers where it exists, all parameters are floating-point
    numbers on CPU or CUDA, and no step has been made; else ``foreach=True``. In new scripts pass
    these arguments to the optimizer itself. Results are those of torch's fused step, which may
    differ from the plain one in the last bits.

    Args:
        do_flatten, check_flatten: no effect; torch's kernels take lists of tensors.

    Returns:
        The same optimizer, with ``fuse_step(closure=None)``, another name of ``step``.

    Raises:
        RuntimeError: it is fused already.
        TypeError: it is not an optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"fuse_optimizer takes an optimizer, not {type(optimizer).__name__}")
    if is_fused_optimizer(optimizer):
        raise RuntimeError(f"this {type(optimizer).__name__} is fused already")
    way = _way(optimizer)
    if way is None:
        warn(
            f"{type(optimizer).__name__} has neither a fused nor a foreach step: fuse_step() is "
            "its step()"
        )
    else:
        for group in [*optimizer.param_groups, optimizer.defaults]:
            group["foreach"], group["fused"] = way == "foreach", way == "fused"

    def fuse_step(closure: Callable[[], Any] | None = None) -> Any:
        return optimizer.step(closure)

    setattr(optimizer, "fuse_step", fuse_step)  # noqa: B010 - no attribute that mypy knows
    setattr(optimizer, _MARK, True)
    return optimizer


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`fuse_optimizer` has been called on this optimizer."""
    return getattr(optimizer, _MARK, False) is True


def _way(optimizer: torch.optim.Optimizer) -> str | None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fits = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    if "fused" in optimizer.defaults and fits and not optimizer.state and not differentiable:
        return "fused"
    return "foreach" if "foreach" in optimizer.defaults and not differentiable else None
