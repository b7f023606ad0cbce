"""Eager collectives that combine the elements of all ranks.

Common contract: ``comm`` is a communicator, None or ``CommMember.WORLD`` for all ranks, or
``CommMember.NON_COMM_MEMBER``, with which a call does nothing. Every member makes the same call;
the call returns when the result is there. ``n`` is the number of members, ranks are ranks inside
the communicator. Tensors are dense and contiguous, of any shape: only the number of elements
counts. Autograd does not see what happens. All functions raise

* ValueError and TypeError for arguments that do not fit, before anything is sent,
* RuntimeError before ``init_process_group``,
* BaguaTimeoutError and BaguaError when the others do not answer or the transport fails.

Sizes are checked on each rank by itself: that they agree between ranks is up to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bagua._core.eager.checks import (
    check_divisible,
    check_numel,
    check_pair,
    check_rank,
    check_reducible,
    check_same_kind,
    check_tensor,
)
from bagua._core.group.communicator import CommMember, Communicator, ReduceOp
from bagua._core.group.process_group import member_of

__all__ = [
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
]

TORCH_OPS = {op: getattr(dist.ReduceOp, op.name) for op in ReduceOp}


def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Communicator | CommMember | None = None,
) -> None:
    """Reduce the ranks' ``send_tensor`` into every rank's ``recv_tensor``.

    Both have the same number of elements and dtype; they may be one tensor.
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_pair("allreduce", send_tensor, recv_tensor)
    check_numel("allreduce", "recv_tensor", recv_tensor, send_tensor.numel(), "as send_tensor")
    op = check_reducible("allreduce", send_tensor, op)

    result = recv_tensor.detach().flatten()
    result.copy_(send_tensor.detach().flatten())
    _allreduce("allreduce", result, op, member)


def allreduce_inplace(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Communicator | CommMember | None = None,
) -> None:
    """Replace every rank's ``tensor`` by the reduction of all."""
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_tensor("allreduce_inplace", tensor)
    op = check_reducible("allreduce_inplace", tensor, op)

    _allreduce("allreduce_inplace", tensor.detach().flatten(), op, member)


def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    comm: Communicator | CommMember | None = None,
) -> None:
    """:func:`allreduce_inplace` of several tensors of one dtype and device as one message.

    They need not be contiguous.
    """
    name = "allreduce_coalesced_inplace"
    member = member_of(comm)
    if member is None or len(tensors) == 0:
        return
    # Checks
    for tensor in tensors:
        check_tensor(name, tensor, contiguous=False)
    check_same_kind(name, tensors)
    op = check_reducible(name, tensors[0], op)

    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    _allreduce(name, flat, op, member)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Communicator | CommMember | None = None,
) -> None:
    """Reduce the ranks' ``send_tensor`` into ``recv_tensor`` of rank ``dst``.

    Both have the same number of elements and dtype; ``recv_tensor`` of the others stays as it is.
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_pair("reduce", send_tensor, recv_tensor)
    check_numel("reduce", "recv_tensor", recv_tensor, send_tensor.numel(), "as send_tensor")
    check_rank("reduce", "dst", dst, member)
    op = check_reducible("reduce", send_tensor, op)

    _reduce("reduce", send_tensor, recv_tensor, dst, op, member)


def reduce_inplace(
    tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Communicator | CommMember | None = None,
) -> None:
    """Replace ``tensor`` of rank ``dst`` by the reduction of all; the others' stay as they are."""
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_tensor("reduce_inplace", tensor)
    check_rank("reduce_inplace", "dst", dst, member)
    op = check_reducible("reduce_inplace", tensor, op)

    _reduce("reduce_inplace", tensor, tensor, dst, op, member)


def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Communicator | CommMember | None = None,
) -> None:
    """Give rank r the reduction of the ranks' r-th parts of ``send_tensor``.

    ``send_tensor`` has n times the elements of ``recv_tensor``.
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_pair("reduce_scatter", send_tensor, recv_tensor)
    expected = member.nranks() * recv_tensor.numel()
    check_numel("reduce_scatter", "send_tensor", send_tensor, expected, "ranks x recv_tensor")
    op = check_reducible("reduce_scatter", send_tensor, op)

    _reduce_scatter(
        "reduce_scatter",
        send_tensor.detach().flatten(),
        recv_tensor.detach().flatten(),
        op,
        member,
    )


def reduce_scatter_inplace(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Communicator | CommMember | None = None,
) -> None:
    """:func:`reduce_scatter` into the first numel/n elements of ``tensor``; the rest stays."""
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_tensor("reduce_scatter_inplace", tensor)
    check_divisible("reduce_scatter_inplace", tensor, member.nranks())
    op = check_reducible("reduce_scatter_inplace", tensor, op)

    flat = tensor.detach().flatten()
    result = torch.empty_like(flat[: flat.numel() // member.nranks()])
    _reduce_scatter("reduce_scatter_inplace", flat, result, op, member)
    flat[: result.numel()].copy_(result)


def _allreduce(name: str, flat: torch.Tensor, op: ReduceOp, member: Communicator) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = TORCH_OPS[op]
    member.run(name, flat.device, lambda backend: backend.allreduce([flat], options))


def _reduce(
    name: str,
    send: torch.Tensor,
    recv: torch.Tensor,
    dst: int,
    op: ReduceOp,
    member: Communicator,
) -> None:
    # A backend may use the buffers of all ranks for parts of the sum: only dst's may be the user's.
    if member.rank() == dst:
        work = recv.detach().flatten()
        work.copy_(send.detach().flatten())
    else:
        work = send.detach().flatten().clone()
    options = dist.ReduceOptions()
    options.reduceOp = TORCH_OPS[op]
    options.rootRank = dst
    member.run(name, work.device, lambda backend: backend.reduce([work], options))


def _reduce_scatter(
    name: str, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp, member: Communicator
) -> None:
    options = dist.ReduceScatterOptions()
    options.reduceOp = TORCH_OPS[op]
    member.run(
        name,
        send.device,
        lambda backend: backend._reduce_scatter_base(recv, send, options),
    )
