"""Eager collectives that combine the elements of all ranks.

Common contract: ``comm`` is a communicator, None or ``CommMember.WORLD`` for all ranks, or
``CommMember.NON_COMM_MEMBER``, with which a call does nothing. Every member makes the same call;
the call returns when the result is there. ``n`` is the number of members, ranks are ranks inside
the communicator. Tensors are dense and contiguous, of any shape: only the number of elements
counts. Autograd does not see what happens. Floating-point and complex CPU tensors get the bits of
``torch.distributed.all_reduce`` over gloo (AVG: divided afterwards); products, which are multiplied
in the order of ranks, and ``BAGUA_COMM`` set to shm or auto are the exceptions. All functions raise

* ValueError and TypeError for arguments that do not fit, before anything is sent,
* RuntimeError before ``init_process_group``,
* BaguaTimeoutError and BaguaError when the others do not answer or the transport fails.

Sizes are checked on each rank by itself: that they agree between ranks is up to the caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from bagua import _C
from bagua._core.eager.checks import (
    check_divisible,
    check_numel,
    check_pair,
    check_rank,
    check_reducible,
    check_same_kind,
    check_tensor,
)
from bagua._core.eager.collectives import as_bytes, coalesced
from bagua._core.group.process_group import Comm, Communicator, ReduceOp, member_of

# AVG is divided afterwards: the mean of small integers is exact.
TRANSPORTS_OPS = {
    ReduceOp.SUM: _C.ReduceOp.SUM,
    ReduceOp.AVG: _C.ReduceOp.SUM,
    ReduceOp.MIN: _C.ReduceOp.MIN,
    ReduceOp.MAX: _C.ReduceOp.MAX,
}
FOLDS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BXOR: torch.bitwise_xor,
    ReduceOp.AVG: torch.add,
}


def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """Reduce the ranks' ``send_tensor`` into every rank's ``recv_tensor``.

    Both have the same number of elements and dtype; they may be one tensor.

    Example::

        mine, total = torch.tensor([1.0, bagua.get_rank()]), torch.empty(2)
        bagua.allreduce(mine, total)  # with 2 ranks: [2, 1]
    """
    member = member_of(comm)
    if member is None:
        return
    op = _check_reduction("allreduce", send_tensor, recv_tensor, op)
    result = recv_tensor.detach().flatten()
    result.copy_(send_tensor.detach().flatten())
    _allreduce("allreduce", result, op, member)


def allreduce_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    """Replace every rank's ``tensor`` by the reduction of all.

    Example::

        loss = torch.tensor([1.0 + bagua.get_rank()])
        bagua.allreduce_inplace(loss, op=bagua.ReduceOp.AVG)  # with 2 ranks: [1.5]
    """
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
    comm: Comm = None,
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

    with coalesced(tensors) as flat:
        _allreduce(name, flat, op, member)


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """Reduce the ranks' ``send_tensor`` into ``recv_tensor`` of rank ``dst``.

    Both have the same number of elements and dtype; ``recv_tensor`` of the others is unchanged.
    The result is that of :func:`allreduce`. For some sizes above 2 MiB times n,
    ``torch.distributed.reduce`` over gloo adds in another order than its own all-reduce.

    Example::

        mine, total = torch.ones(2), torch.zeros(2)
        bagua.reduce(mine, total, dst=0)  # rank 0 of 2: [2, 2]
    """
    _reduce("reduce", send_tensor, recv_tensor, dst, op, comm)


def reduce_inplace(
    tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """Replace ``tensor`` of rank ``dst`` by the reduction of all; the others' are unchanged.

    Example::

        counts = torch.ones(2)
        bagua.reduce_inplace(counts, dst=0)  # rank 0 of 2: [2, 2]; rank 1: [1, 1]
    """
    _reduce("reduce_inplace", tensor, tensor, dst, op, comm)


def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """Give rank r the reduction of the ranks' r-th parts of ``send_tensor``.

    ``send_tensor`` has n times the elements of ``recv_tensor``.

    Example::

        n = bagua.get_world_size()
        parts, own = torch.arange(2.0 * n), torch.empty(2)
        bagua.reduce_scatter(parts, own)  # rank 1 of 2: [4, 6]
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
    comm: Comm = None,
) -> None:
    """:func:`reduce_scatter` into the first numel/n elements of ``tensor``; the rest stays.

    Example::

        tensor = torch.ones(2 * bagua.get_world_size())
        bagua.reduce_scatter_inplace(tensor)  # with 2 ranks it begins with [2, 2]
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_tensor("reduce_scatter_inplace", tensor)
    check_divisible("reduce_scatter_inplace", tensor, member.nranks())
    op = check_reducible("reduce_scatter_inplace", tensor, op)

    flat = tensor.detach().flatten()
    result = flat[: flat.numel() // member.nranks()]
    _reduce_scatter("reduce_scatter_inplace", flat, result, op, member)


def _check_reduction(name: str, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp) -> ReduceOp:
    check_pair(name, send, recv)
    check_numel(name, "recv_tensor", recv, send.numel(), "as send_tensor")
    return check_reducible(name, send, op)


def _allreduce(name: str, flat: torch.Tensor, op: ReduceOp, member: Communicator) -> None:
    # The sum of complex numbers is that of their parts, which every transport can add.
    reals = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat

    def move(connected: _C.Communicator) -> None:
        if op in TRANSPORTS_OPS:
            connected.all_reduce(reals, TRANSPORTS_OPS[op])
            if op is ReduceOp.AVG:
                flat.div_(connected.size)
            return
        # 1. Reduce one part on each rank. 2. Gather the parts.
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % connected.size))
        part = _reduced_part(connected, padded, op)
        connected.all_gather(as_bytes(part), as_bytes(padded))
        flat.copy_(padded[: flat.numel()])

    member.run(name, flat.device, move, sums_of_torch=_has_sums_of_torch(flat, op))


def _has_sums_of_torch(flat: torch.Tensor, op: ReduceOp) -> bool:
    """Whether the result depends on the order of the ranks, and torch's order is to be had."""
    inexact = flat.is_floating_point() or flat.is_complex()
    return inexact and flat.device.type == "cpu" and op in TRANSPORTS_OPS


def _reduce(
    name: str,
    send: torch.Tensor,
    recv: torch.Tensor,
    dst: int,
    op: ReduceOp,
    comm: Comm,
) -> None:
    member = member_of(comm)
    if member is None:
        return
    op = _check_reduction(name, send, recv, op)
    check_rank(name, "dst", dst, member)
    result = send.detach().flatten().clone()
    _allreduce(name, result, op, member)
    if member.rank() == dst:
        recv.detach().flatten().copy_(result)


def _reduce_scatter(
    name: str, send: torch.Tensor, recv: torch.Tensor, op: ReduceOp, member: Communicator
) -> None:
    if _has_sums_of_torch(send, op):  # as torch's own, an all-reduce of which a part is taken
        result = send.clone()
        _allreduce(name, result, op, member)
        recv.copy_(result.narrow(0, member.rank() * recv.numel(), recv.numel()))
        return

    def move(connected: _C.Communicator) -> None:
        recv.copy_(_reduced_part(connected, send, op))

    member.run(name, send.device, move)


def _reduced_part(connected: _C.Communicator, flat: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """The reduction of all ranks' parts for this rank, in the order of ranks."""
    parts = torch.empty_like(flat)
    connected.all_to_all(as_bytes(flat), as_bytes(parts))
    by_rank = parts.view(connected.size, flat.numel() // connected.size).unbind()
    result = functools.reduce(FOLDS[op], by_rank)
    return result / connected.size if op is ReduceOp.AVG else result
