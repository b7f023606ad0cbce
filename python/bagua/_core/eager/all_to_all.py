"""Eager collectives in which every rank sends different data to every rank.

The common contract is that of ``_collectives``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua._core.eager.checks import (
    check_divisible,
    check_numel,
    check_pair,
    check_parts,
    check_tensor,
)
from bagua._core.eager.collectives import as_bytes
from bagua._core.group.communicator import CommMember, Communicator
from bagua._core.group.process_group import member_of

__all__ = ["alltoall", "alltoall_inplace", "alltoall_v", "alltoall_v_inplace"]


def alltoall(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    comm: Communicator | CommMember | None = None,
) -> None:
    """Part j of rank i's ``send_tensor`` becomes part i of rank j's ``recv_tensor``.

    Both have the same number of elements, which n divides.
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_pair("alltoall", send_tensor, recv_tensor)
    check_numel("alltoall", "recv_tensor", recv_tensor, send_tensor.numel(), "as send_tensor")
    check_divisible("alltoall", send_tensor, member.nranks())

    _alltoall("alltoall", as_bytes(send_tensor), as_bytes(recv_tensor), member)


def alltoall_inplace(tensor: torch.Tensor, comm: Communicator | CommMember | None = None) -> None:
    """:func:`alltoall` from a copy of ``tensor`` into it."""
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_tensor("alltoall_inplace", tensor)
    check_divisible("alltoall_inplace", tensor, member.nranks())

    data = as_bytes(tensor)
    _alltoall("alltoall_inplace", data.clone(), data, member)


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Communicator | CommMember | None = None,
) -> None:
    """Send rank j ``send_counts[j]`` elements from ``send_displs[j]`` on, for every j.

    What rank i sends goes to ``recv_displs[i]``; its number of elements must be
    ``recv_counts[i]``. Lists may be longer than n: the first n entries count. Elements of
    ``recv_tensor`` outside of all parts stay as they are.
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_pair("alltoall_v", send_tensor, recv_tensor)
    check_parts("alltoall_v", send_tensor, send_counts, send_displs, member.nranks())
    check_parts("alltoall_v", recv_tensor, recv_counts, recv_displs, member.nranks())
    own = member.rank()
    if send_counts[own] != recv_counts[own]:
        raise ValueError(
            f"alltoall_v: rank {own} sends itself {send_counts[own]} elements, but expects "
            f"{recv_counts[own]}"
        )

    _exchange_parts(
        "alltoall_v",
        (send_tensor, send_counts, send_displs),
        (recv_tensor, recv_counts, recv_displs),
        member,
    )


def alltoall_v_inplace(
    tensor: torch.Tensor,
    counts: Sequence[int],
    displs: Sequence[int],
    comm: Communicator | CommMember | None = None,
) -> None:
    """:func:`alltoall_v` from a copy of ``tensor`` into it, with the same parts both ways."""
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_tensor("alltoall_v_inplace", tensor)
    check_parts("alltoall_v_inplace", tensor, counts, displs, member.nranks())

    copied = (tensor.detach().clone(), counts, displs)
    _exchange_parts("alltoall_v_inplace", copied, (tensor, counts, displs), member)


Parts = tuple[torch.Tensor, Sequence[int], Sequence[int]]


def _exchange_parts(name: str, send: Parts, recv: Parts, member: Communicator) -> None:
    sends, recvs = _bytes_of_parts(send, member.nranks()), _bytes_of_parts(recv, member.nranks())
    member.run(name, send[0].device, lambda connected: connected.exchange(sends, recvs))


def _bytes_of_parts(parts: Parts, size: int) -> list[tuple[torch.Tensor, int]]:
    tensor, counts, displs = parts
    flat = tensor.detach().flatten()
    return [(as_bytes(flat[displs[r] : displs[r] + counts[r]]), r) for r in range(size)]


def _alltoall(name: str, send: torch.Tensor, recv: torch.Tensor, member: Communicator) -> None:
    member.run(name, send.device, lambda connected: connected.all_to_all(send, recv))
