"""Horovod as the transport of aggregations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from types import ModuleType
from typing import cast

import torch
import torch.distributed as dist
from bagua import _C
from bagua._core.group.connections import Connections, first_difference
from torch.distributed import distributed_c10d as c10d

__all__ = ["HorovodCommunicator", "HorovodTransport"]

# dtypes that Horovod does not reduce, and what they travel as. Sums of bytes wrap as
# usual when they are narrowed again; half precision is rounded once, after the sum.
_TRAVELS_AS = {
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
}


class HorovodCommunicator:
    """Reductions and broadcasts through Horovod, counted as a ``CountingCommunicator`` counts.

    All ranks make the same calls in the same order. Calls return when the result is there.

    Args:
        horovod: the module ``horovod.torch``, initialised.
        name: distinguishes its messages; equal on all ranks.
    """

    def __init__(self, horovod: ModuleType, name: str) -> None:
        self._horovod = horovod
        self._name = name
        self._ops = {
            _C.ReduceOp.SUM: horovod.Sum,
            _C.ReduceOp.MIN: horovod.Min,
            _C.ReduceOp.MAX: horovod.Max,
        }
        self._bytes = 0
        self._messages = 0

    @property
    def rank(self) -> int:
        """This process's rank."""
        return int(self._horovod.rank())

    def all_reduce(self, tensor: torch.Tensor, op: _C.ReduceOp) -> None:
        """Reduce one contiguous tensor over all ranks, in place, by ``hvd.allreduce_``.

        Raises:
            horovod.torch.HorovodInternalError: a rank failed, has ended or shut Horovod down.
        """
        on_wire = _widened(tensor)
        self._horovod.allreduce_(on_wire, op=self._ops[op], name=self._called([tensor]))
        self._count([on_wire])
        _give_back([on_wire], [tensor])

    def all_reduce_together(self, tensors: Sequence[torch.Tensor], op: _C.ReduceOp) -> None:
        """As :meth:`all_reduce`, for tensors of one device, by ``hvd.grouped_allreduce_``."""
        on_wire = [_widened(tensor) for tensor in tensors]
        self._horovod.grouped_allreduce_(on_wire, op=self._ops[op], name=self._called(tensors))
        self._count(on_wire)
        _give_back(on_wire, tensors)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Overwrite one contiguous tensor, of any dtype, with that of rank ``root``."""
        data = tensor.view(-1).view(torch.uint8)
        self._horovod.broadcast_(data, root, name=self._called([tensor]))
        self._messages += 1
        self._bytes += tensor.nbytes

    def traffic(self) -> dict[str, int]:
        """Bytes and messages until now, as of gloo's ring; Horovod itself does not count."""
        return {
            "bytes_sent": self._bytes,
            "bytes_received": self._bytes,
            "messages_sent": self._messages,
            "messages_received": self._messages,
        }

    def _called(self, tensors: Sequence[torch.Tensor]) -> str:
        """A name that has one shape, so that Horovod need not negotiate it in every step."""
        return "/".join([self._name, *(f"{t.dtype}x{t.numel()}" for t in tensors)])

    def _count(self, tensors: Sequence[torch.Tensor]) -> None:
        size = self._horovod.size()
        self._messages += 2 * (size - 1)
        self._bytes += 2 * sum(tensor.nbytes for tensor in tensors) * (size - 1) // size


class HorovodTransport(Connections):
    """The ranks of Horovod; every aggregation has its own.

    Args:
        horovod: the module ``horovod.torch``, initialised.
    """

    _objects = itertools.count(1)

    def __init__(self, horovod: ModuleType) -> None:
        nothing = dist.HashStore()  # type: ignore[attr-defined]
        super().__init__(
            nothing, horovod.rank(), list(range(horovod.size())), c10d.default_pg_timeout
        )
        self._horovod = horovod
        self._number = next(self._objects)

    def connect(
        self,
        name: str,
        device: torch.device | str,
        members: list[int] | None = None,
        *,
        sums_of_torch: bool = False,
    ) -> _C.CountingCommunicator:
        """A communicator over all ranks, with Horovod's sums.

        Raises:
            NotImplementedError: ``members`` are not all ranks.
        """
        if members is not None and len(members) != self.size:
            raise NotImplementedError(f"Horovod reaches all {self.size} ranks, not {members}")
        made = HorovodCommunicator(self._horovod, f"bagua/{self._number}/{name}")
        return cast("_C.CountingCommunicator", made)  # it has the methods that are called here

    def agree(self, what: str, lines: list[str]) -> None:
        """Check that all ranks describe ``what`` with the same lines.

        Raises:
            BaguaMismatchError: on every rank, listing the first difference from rank 0.
        """
        text = torch.tensor(list(json.dumps(lines).encode()), dtype=torch.uint8, device="cpu")
        name = f"bagua/{self._number}/lines"
        length = torch.tensor([text.numel()], device="cpu")
        lengths = self._horovod.allgather(length, name=f"{name}/lengths")
        parts = self._horovod.allgather(text, name=name).split(lengths.tolist())
        everyone = [json.loads(bytes(part.tolist())) for part in parts]
        for other, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise _C.BaguaMismatchError(
                    f"ranks differ in {what}. First difference: "
                    f"{first_difference(everyone[0], theirs, other)}. "
                    "Build the same model with the same arguments on every rank."
                )


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy that Horovod can reduce."""
    return tensor.to(_TRAVELS_AS.get(tensor.dtype, tensor.dtype))


def _give_back(on_wire: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for sent, tensor in zip(on_wire, tensors, strict=True):
        if sent is not tensor:
            tensor.copy_(sent)
