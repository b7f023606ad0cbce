"""Eager collectives in which every rank sends different data to every rank.

The common contract is that of ``reductions``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua import _C
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

    Example::

        n, rank = bagua.get_world_size(), bagua.get_rank()
        send, recv = torch.full([n], float(rank)), torch.empty(n)
        bagua.alltoall(send, recv)  # with 2 ranks: [0, 1]
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
    """:func:`alltoall` from a copy of ``tensor`` into it.

    Example::

        tensor = torch.full([bagua.get_world_size()], float(bagua.get_rank()))
        bagua.alltoall_inplace(tensor)  # with 2 ranks: [0, 1]
    """
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
    ``recv_counts[i]``, which the ranks compare first. Lists may be longer than n: the first n
    entries count. Elements of ``recv_tensor`` outside of all parts stay as they are.

    Raises:
        BaguaMismatchError: on every rank, if a part is not as long as its receiver expects; names
            the ranks and the counts. Nothing was exchanged then.

    Example::

        send, recv = torch.ones(3), torch.zeros(3)  # on 2 ranks, each with as many for both
        bagua.alltoall_v(send, [1, 1], [0, 2], recv, [1, 1], [0, 2])  # [1, 0, 1]
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
    """:func:`alltoall_v` from a copy of ``tensor`` into it, with the same parts both ways.

    Raises:
        BaguaMismatchError: as :func:`alltoall_v`.

    Example::

        tensor = torch.full([2], float(bagua.get_rank()))  # on 2 ranks
        bagua.alltoall_v_inplace(tensor, [1, 1], [0, 1])  # [0, 1]
    """
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
    differences: list[str] = []

    def move(connected: _C.Communicator) -> None:
        differences.extend(_differences(send, recv, connected))
        if not differences:
            connected.exchange(sends, recvs)

    member.run(name, send[0].device, move)
    if differences:
        raise _C.BaguaMismatchError(
            f"{name}: the ranks' counts differ, and nothing was exchanged: "
            f"{'; '.join(differences)}. What rank i sends to rank j must be what rank j expects "
            "from rank i."
        )


def _differences(send: Parts, recv: Parts, connected: _C.Communicator) -> list[str]:
    """Parts, at most one per receiver, that are not as long as their receiver expects.

    The ranks exchange their counts, or gloo would end the process: every rank tells every other
    how much it sends, and then all what has not fitted. All ranks get the same result.
    """
    size = connected.size
    if size == 1:
        return []
    device = send[0].device
    width, expected_width = send[0].element_size(), recv[0].element_size()
    told = torch.tensor([[count, width] for count in send[1][:size]], device=device).flatten()
    arriving = torch.empty_like(told)
    connected.all_to_all(told, arriving)
    mine = [-1, 0, 0, 0, 0]  # source, elements and bytes of each, sent and expected
    for source, (count, of_bytes) in enumerate(arriving.view(size, 2).tolist()):
        if count * of_bytes != recv[1][source] * expected_width:
            mine = [source, count, of_bytes, recv[1][source], expected_width]
            break
    everyone = torch.empty(len(mine) * size, dtype=torch.int64, device=device)
    connected.all_gather(torch.tensor(mine, device=device), everyone)
    return [
        f"rank {source} sends {sent} elements of {of_bytes} bytes to rank {receiver}, which "
        f"expects {expected} of {of_expected} bytes"
        for receiver, (source, sent, of_bytes, expected, of_expected) in enumerate(
            everyone.view(size, len(mine)).tolist()
        )
        if source >= 0
    ]


def _bytes_of_parts(parts: Parts, size: int) -> list[tuple[torch.Tensor, int]]:
    tensor, counts, displs = parts
    flat = tensor.detach().flatten()
    return [(as_bytes(flat[displs[r] : displs[r] + counts[r]]), r) for r in range(size)]


def _alltoall(name: str, send: torch.Tensor, recv: torch.Tensor, member: Communicator) -> None:
    member.run(name, send.device, lambda connected: connected.all_to_all(send, recv))
