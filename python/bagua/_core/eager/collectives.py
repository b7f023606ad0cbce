"""Eager collectives that move data, and the barrier. Data moves as bytes, so any dtype works.

The common contract is that of ``reductions``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bagua import _C
from bagua._core.eager.checks import (
    check_count,
    check_divisible,
    check_numel,
    check_pair,
    check_parts,
    check_peer,
    check_rank,
    check_same_kind,
    check_tensor,
)
from bagua._core.group.process_group import Comm, Communicator, member_of


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, one dimension, unknown to autograd."""
    return tensor.detach().flatten().view(torch.uint8)


def barrier(comm: Comm = None) -> None:
    """Block until every rank is here and this process's device has nothing left to do.

    Example::

        bagua.barrier()
    """
    member = member_of(comm)
    if member is not None:
        member.barrier()


def send(tensor: torch.Tensor, dst: int, comm: Comm = None) -> None:
    """Send the whole ``tensor`` to rank ``dst``, which calls :func:`recv`.

    Example::

        if bagua.get_rank() == 0:
            bagua.send(torch.ones(4), dst=1)
        elif bagua.get_rank() == 1:
            bagua.recv(torch.empty(4), src=0)
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_tensor("send", tensor)
    check_peer("send", "dst", dst, member)

    member.exchange("send", dst, sends=[as_bytes(tensor)], recvs=[])


def recv(tensor: torch.Tensor, src: int, comm: Comm = None) -> None:
    """Fill ``tensor`` with what rank ``src`` sends: as many elements, of the same dtype.

    Example::

        received = torch.empty(4)
        if bagua.get_rank() == 1:
            bagua.recv(received, src=0)  # [1, 1, 1, 1]
        elif bagua.get_rank() == 0:
            bagua.send(torch.ones(4), dst=1)
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_tensor("recv", tensor)
    check_peer("recv", "src", src, member)

    member.exchange("recv", src, sends=[], recvs=[as_bytes(tensor)])


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Comm = None) -> None:
    """Replace every rank's ``tensor`` by that of rank ``src``.

    Example::

        order = torch.randperm(10)
        bagua.broadcast(order, src=0)  # the same on all ranks
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_tensor("broadcast", tensor)
    check_rank("broadcast", "src", src, member)

    _broadcast("broadcast", as_bytes(tensor), src, member)


@contextmanager
def coalesced(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """One flat copy of all ``tensors``, copied back into them at the end."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    yield flat
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def broadcast_coalesced(tensors: Sequence[torch.Tensor], src: int = 0, comm: Comm = None) -> None:
    """:func:`broadcast` of several tensors of one dtype and device as one message.

    They need not be contiguous.
    """
    member = member_of(comm)
    if member is None or len(tensors) == 0:
        return
    # Checks
    for tensor in tensors:
        check_tensor("broadcast_coalesced", tensor, contiguous=False)
    check_same_kind("broadcast_coalesced", tensors)
    check_rank("broadcast_coalesced", "src", src, member)

    with coalesced(tensors) as flat:
        _broadcast("broadcast_coalesced", as_bytes(flat), src, member)


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """Give every rank the ``send_tensor`` of all: part i of ``recv_tensor`` is rank i's.

    ``recv_tensor`` has n times the elements of ``send_tensor``.

    Example::

        mine = torch.tensor([float(bagua.get_rank())])
        all_of_them = torch.empty(bagua.get_world_size())
        bagua.allgather(mine, all_of_them)  # with 2 ranks: [0, 1]
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_pair("allgather", send_tensor, recv_tensor)
    expected = member.nranks() * send_tensor.numel()
    check_numel("allgather", "recv_tensor", recv_tensor, expected, "ranks x send_tensor")

    _allgather("allgather", as_bytes(send_tensor), as_bytes(recv_tensor), member)


def allgather_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    """Give every rank all n equal parts of ``tensor``; rank r contributes its part r.

    Example::

        tensor = torch.zeros(bagua.get_world_size())
        tensor[bagua.get_rank()] = 1.0 + bagua.get_rank()
        bagua.allgather_inplace(tensor)  # with 2 ranks: [1, 2]
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_tensor("allgather_inplace", tensor)
    check_divisible("allgather_inplace", tensor, member.nranks())

    data = as_bytes(tensor)
    own = _parts(data, member.nranks())[member.rank()]
    _allgather("allgather_inplace", own, data, member)


def gather(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    comm: Comm = None,
) -> None:
    """Give rank ``dst`` the ``send_tensor`` of all: part i of ``recv_tensor`` is rank i's.

    ``recv_tensor`` has n times the elements of ``send_tensor`` on every rank; that of the others
    is unchanged.

    Example::

        mine = torch.tensor([float(bagua.get_rank())])
        all_of_them = torch.zeros(bagua.get_world_size())
        bagua.gather(mine, all_of_them, dst=0)  # rank 0 of 2: [0, 1]
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_pair("gather", send_tensor, recv_tensor)
    check_rank("gather", "dst", dst, member)
    expected = member.nranks() * send_tensor.numel()
    check_numel("gather", "recv_tensor", recv_tensor, expected, "ranks x send_tensor")

    _gather("gather", as_bytes(send_tensor), as_bytes(recv_tensor), dst, member)


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: Comm = None) -> None:
    """Give rank ``dst`` the ``count`` elements of every rank.

    On ``dst`` the tensor has n times ``count`` elements, its own part already in place ``dst``; on
    the others it has ``count``.

    Example::

        count = bagua.get_world_size() if bagua.get_rank() == 0 else 1
        tensor = torch.full([count], float(bagua.get_rank()))
        bagua.gather_inplace(tensor, count=1, dst=0)  # rank 0 of 2: [0, 1]
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    _check_inplace("gather_inplace", "dst", tensor, count, dst, member)

    data = as_bytes(tensor)
    own = _parts(data, member.nranks())[dst] if member.rank() == dst else data
    _gather("gather_inplace", own, data, dst, member)


def scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    src: int,
    comm: Comm = None,
) -> None:
    """Give rank i part i of rank ``src``'s ``send_tensor``.

    ``send_tensor`` has n times the elements of ``recv_tensor`` on every rank.

    Example::

        parts, own = torch.arange(2.0 * bagua.get_world_size()), torch.empty(2)
        bagua.scatter(parts, own, src=0)  # rank 1 of 2: [2, 3]
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_pair("scatter", send_tensor, recv_tensor)
    check_rank("scatter", "src", src, member)
    expected = member.nranks() * recv_tensor.numel()
    check_numel("scatter", "send_tensor", send_tensor, expected, "ranks x recv_tensor")

    _scatter("scatter", as_bytes(send_tensor), as_bytes(recv_tensor), src, member)


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: Comm = None) -> None:
    """Give every rank ``count`` elements of rank ``src``.

    On ``src`` the tensor has n times ``count`` elements and is unchanged (its own part is part
    ``src``); on the others it has ``count`` and is replaced.

    Example::

        count = bagua.get_world_size() if bagua.get_rank() == 0 else 1
        tensor = torch.arange(float(count))
        bagua.scatter_inplace(tensor, count=1, src=0)  # rank 1 of 2: [1]
    """
    member = member_of(comm)
    if member is None:
        return
    # Checks
    _check_inplace("scatter_inplace", "src", tensor, count, src, member)

    data = as_bytes(tensor)
    own = _parts(data, member.nranks())[src] if member.rank() == src else data
    _scatter("scatter_inplace", data, own, src, member)


def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """Part j of rank i's ``send_tensor`` becomes part i of rank j's ``recv_tensor``.

    Both have the same number of elements, which n divides.

    Example::

        n, rank = bagua.get_world_size(), bagua.get_rank()
        send, recv = torch.full([n], float(rank)), torch.empty(n)
        bagua.alltoall(send, recv)  # with 2 ranks: [0, 1]
    """
    _alltoall("alltoall", send_tensor, recv_tensor, comm)


def alltoall_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    """:func:`alltoall` from a copy of ``tensor`` into it.

    Example::

        tensor = torch.full([bagua.get_world_size()], float(bagua.get_rank()))
        bagua.alltoall_inplace(tensor)  # with 2 ranks: [0, 1]
    """
    _alltoall("alltoall_inplace", tensor, tensor, comm)


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Comm = None,
) -> None:
    """Send rank j ``send_counts[j]`` elements from ``send_displs[j]`` on, for every j.

    What rank i sends goes to ``recv_displs[i]``; its number of elements must be
    ``recv_counts[i]``, which the ranks compare first. Lists may be longer than n: the first n
    entries count. Elements of ``recv_tensor`` outside of all parts are unchanged.

    Raises:
        BaguaMismatchError: on every rank, if a part is not as long as its receiver expects; names
            the ranks and the counts. Nothing was exchanged then.

    Example::

        send, recv = torch.ones(3), torch.zeros(3)  # on 2 ranks, each with as many for both
        bagua.alltoall_v(send, [1, 1], [0, 2], recv, [1, 1], [0, 2])  # [1, 0, 1]
    """
    send = (send_tensor, send_counts, send_displs)
    _exchange_parts("alltoall_v", send, (recv_tensor, recv_counts, recv_displs), comm)


def alltoall_v_inplace(
    tensor: torch.Tensor,
    counts: Sequence[int],
    displs: Sequence[int],
    comm: Comm = None,
) -> None:
    """:func:`alltoall_v` from a copy of ``tensor`` into it, with the same parts both ways.

    Raises:
        BaguaMismatchError: as :func:`alltoall_v`.

    Example::

        tensor = torch.full([2], float(bagua.get_rank()))  # on 2 ranks
        bagua.alltoall_v_inplace(tensor, [1, 1], [0, 1])  # [0, 1]
    """
    parts = (tensor, counts, displs)
    _exchange_parts("alltoall_v_inplace", parts, parts, comm)


def _check_inplace(
    name: str, what: str, tensor: torch.Tensor, count: int, root: int, member: Communicator
) -> None:
    check_tensor(name, tensor)
    check_count(name, "count", count)
    check_rank(name, what, root, member)
    if member.rank() == root:
        check_numel(name, "tensor", tensor, member.nranks() * count, f"ranks x count on {what}")
    else:
        check_numel(name, "tensor", tensor, count, f"count, on ranks other than {what}")


def _parts(data: torch.Tensor, size: int) -> list[torch.Tensor]:
    part = data.numel() // size
    return [data[rank * part : (rank + 1) * part] for rank in range(size)]


def _broadcast(name: str, data: torch.Tensor, src: int, member: Communicator) -> None:
    member.run(name, data.device, lambda connected: connected.broadcast(data, src))


def _allgather(name: str, send: torch.Tensor, recv: torch.Tensor, member: Communicator) -> None:
    member.run(name, send.device, lambda connected: connected.all_gather(send, recv))


def _gather(
    name: str, send: torch.Tensor, recv: torch.Tensor, dst: int, member: Communicator
) -> None:
    parts = _parts(recv, member.nranks()) if member.rank() == dst else []
    recvs = [(part, rank) for rank, part in enumerate(parts)]
    member.run(name, send.device, lambda connected: connected.exchange([(send, dst)], recvs))


def _scatter(
    name: str, send: torch.Tensor, recv: torch.Tensor, src: int, member: Communicator
) -> None:
    parts = _parts(send, member.nranks()) if member.rank() == src else []
    sends = [(part, rank) for rank, part in enumerate(parts)]
    member.run(name, recv.device, lambda connected: connected.exchange(sends, [(recv, src)]))


Parts = tuple[torch.Tensor, Sequence[int], Sequence[int]]


def _exchange_parts(name: str, send: Parts, recv: Parts, comm: Comm) -> None:
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_pair(name, send[0], recv[0])
    check_parts(name, *send, member.nranks())
    check_parts(name, *recv, member.nranks())
    own, sent, expected = member.rank(), send[1], recv[1]
    if sent[own] != expected[own]:
        raise ValueError(
            f"{name}: rank {own} sends itself {sent[own]} elements, but expects {expected[own]}"
        )

    if send[0] is recv[0]:
        send = (send[0].detach().clone(), *send[1:])
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


def _alltoall(name: str, send: torch.Tensor, recv: torch.Tensor, comm: Comm) -> None:
    member = member_of(comm)
    if member is None:
        return
    # Checks
    check_pair(name, send, recv)
    check_numel(name, "recv_tensor", recv, send.numel(), "as send_tensor")
    check_divisible(name, send, member.nranks())

    sent = as_bytes(send.clone() if send is recv else send)
    member.run(name, send.device, lambda connected: connected.all_to_all(sent, as_bytes(recv)))
