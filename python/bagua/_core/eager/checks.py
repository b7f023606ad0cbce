"""Checks of the arguments of collectives. Everything is checked before anything is sent.

Each function raises ValueError for a wrong size, layout or rank and TypeError for a wrong type; the
message begins with the name of the collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua._core.group.process_group import Communicator, ReduceOp

BITWISE = (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR)
CPU_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def check_tensor(name: str, tensor: torch.Tensor, contiguous: bool = True) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: needs a tensor, not a {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: needs a dense tensor, not {tensor.layout}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(
            f"{name}: the tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} "
            "is not contiguous; pass tensor.contiguous()"
        )


def check_pair(name: str, send: torch.Tensor, recv: torch.Tensor) -> None:
    check_tensor(name, send)
    check_tensor(name, recv)
    check_same_kind(name, [send, recv])


def check_same_kind(name: str, tensors: Sequence[torch.Tensor]) -> None:
    first = tensors[0]
    for tensor in tensors:
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{name}: tensors must have one dtype and device; there are {first.dtype} on "
                f"{first.device} and {tensor.dtype} on {tensor.device}"
            )


def check_numel(name: str, what: str, tensor: torch.Tensor, expected: int, why: str) -> None:
    if tensor.numel() != expected:
        raise ValueError(f"{name}: {what} has {tensor.numel()} elements, not {expected} ({why})")


def check_divisible(name: str, tensor: torch.Tensor, size: int) -> None:
    if tensor.numel() % size != 0:
        raise ValueError(
            f"{name}: {tensor.numel()} elements cannot be shared equally by {size} ranks"
        )


def check_count(name: str, what: str, count: int) -> None:
    """A number of elements, which NumPy's and torch's integers may give."""
    if not hasattr(count, "__index__"):
        raise TypeError(f"{name}: {what} must be an integer, not {count!r}")
    if count < 0:
        raise ValueError(f"{name}: {what} must not be negative, it is {count}")


def check_rank(name: str, what: str, rank: int, member: Communicator) -> None:
    if not isinstance(rank, int):
        raise TypeError(f"{name}: {what} must be an integer, not {rank!r}")
    if not 0 <= rank < member.nranks():
        raise ValueError(
            f"{name}: {what}={rank} is not a rank of this communicator of {member.nranks()}; ranks "
            "are counted inside the communicator"
        )


def check_peer(name: str, what: str, rank: int, member: Communicator) -> None:
    check_rank(name, what, rank, member)
    if rank == member.rank():
        raise ValueError(f"{name}: {what}={rank} is this process itself")


def check_reducible(name: str, tensor: torch.Tensor, op: ReduceOp) -> ReduceOp:
    """Returns ``op``, which must be defined for the tensor's dtype, as a ``ReduceOp``."""
    op = ReduceOp(op)
    dtype = tensor.dtype
    if tensor.device.type == "cpu" and dtype not in CPU_DTYPES:
        raise TypeError(f"{name}: gloo cannot reduce {dtype}; convert it, to int32 or float32 say")
    inexact = dtype.is_floating_point or dtype.is_complex
    if op in BITWISE and inexact:
        raise TypeError(f"{name}: {op.name} works on bits of integers and booleans, not {dtype}")
    if op is ReduceOp.AVG and not inexact:
        raise TypeError(f"{name}: AVG needs floating-point numbers, not {dtype}; use SUM")
    if dtype.is_complex and op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise TypeError(f"{name}: {op.name} is not defined for {dtype}; only SUM and AVG are")
    if dtype == torch.bool and op is ReduceOp.SUM:
        raise TypeError(f"{name}: booleans have no SUM; use BOR or MAX, or convert to an integer")
    return op


def check_parts(
    name: str, tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], size: int
) -> None:
    """One part per rank, each inside the tensor."""
    if len(counts) < size or len(displs) < size:
        raise ValueError(
            f"{name}: needs a count and a displacement for each of {size} ranks, there are "
            f"{len(counts)} and {len(displs)}"
        )
    for rank in range(size):
        check_count(name, f"counts[{rank}]", counts[rank])
        check_count(name, f"displs[{rank}]", displs[rank])
        if displs[rank] + counts[rank] > tensor.numel():
            raise ValueError(
                f"{name}: rank {rank}'s part, {counts[rank]} elements from {displs[rank]}, goes "
                f"over the tensor's end at {tensor.numel()}"
            )
