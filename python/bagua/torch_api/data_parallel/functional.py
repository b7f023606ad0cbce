"""Differentiable collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bagua._core.eager.reductions import allreduce_inplace
from bagua._core.group.job import as_bagua_group, ensure_initialised
from bagua._core.group.process_group import CommMember, Communicator, ReduceOp

__all__ = ["ReduceOp", "all_reduce"]

_DIFFERENTIABLE = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN)


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp | dist.ReduceOp.RedOpType = ReduceOp.SUM,
    group: Any = None,
) -> torch.Tensor:
    """Reduce ``tensor`` over the ranks of ``group``, differentiably.

    Every rank calls it, and runs backward through it. The loss that is differentiated is the sum of
    all ranks' losses, so a rank's gradient is

    * SUM: the sum of the ranks' incoming gradients;
    * AVG: their mean;
    * MAX, MIN: their sum where this rank has the extreme value and 0 elsewhere; shared equally
      where several ranks have it.

    Args:
        tensor: of any shape, equal on all ranks; is unchanged.
        op: bagua's or torch's SUM, AVG, MAX or MIN.
        group: None for all ranks, a torch process group, or a ``BaguaProcessGroup``.

    Returns:
        A new tensor of the same shape and dtype. On a rank outside of the group, a copy.

    Raises:
        ValueError: another ``op``.
        RuntimeError: there is no process group.
    """
    name = getattr(op, "name", str(op))
    if name not in [known.name for known in _DIFFERENTIABLE]:
        raise ValueError(
            f"all_reduce: {name} has no gradient here, only "
            f"{', '.join(known.name for known in _DIFFERENTIABLE)}; "
            "bagua.communication.allreduce has all operations, without gradients"
        )
    ensure_initialised()
    group = None if group is dist.group.WORLD else group
    comm = as_bagua_group(group).get_global_communicator()
    reduce = ReduceOp[name]
    if reduce in (ReduceOp.SUM, ReduceOp.AVG):
        linear: torch.Tensor = _Linear.apply(tensor, reduce, comm)
        return linear
    extreme: torch.Tensor = _Extreme.apply(tensor, reduce, comm)
    return extreme


def _reduced(tensor: torch.Tensor, op: ReduceOp, comm: Communicator | CommMember) -> torch.Tensor:
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    allreduce_inplace(result, op, comm)
    return result


class _Linear(torch.autograd.Function):
    """SUM and AVG, each of which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: ReduceOp, comm: Any) -> torch.Tensor:
        ctx.op, ctx.comm = op, comm
        return _reduced(tensor, op, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Linear.apply(gradients[0], ctx.op, ctx.comm), None, None


class _Extreme(torch.autograd.Function):
    """MAX and MIN."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: ReduceOp, comm: Any) -> torch.Tensor:
        result = _reduced(tensor, op, comm)
        mine = (tensor == result).to(tensor.dtype)
        ctx.save_for_backward(mine / _reduced(mine, ReduceOp.SUM, comm))
        ctx.comm = comm
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (share,) = ctx.saved_tensors
        return _Linear.apply(gradients[0], ReduceOp.SUM, ctx.comm) * share, None, None
