"""Replaces torch's all-reduce of gradients over replicas, for which FSDP2 has no interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["ReducedGradients", "all_reduce_can_be_replaced"]


class ReducedGradients(torch.Tensor):
    """Memory in which torch's FSDP2 reduces the gradients of a module.

    With hybrid sharding FSDP2 calls ``torch.distributed.all_reduce`` on the memory that the
    module's custom reduce-scatter has allocated. That function honours ``__torch_function__``, so
    the memory takes the call. Every other function gives what it gives for a plain tensor.

    Attributes:
        over_replicas: called with the tensor, the reduction and the group; returns whether it has
            done the all-reduce, or torch is to.
    """

    over_replicas: Callable[[torch.Tensor, Any, dist.ProcessGroup | None], bool]

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is c10d.all_reduce and _replaced(*args, **kwargs or {}):
                return None
            return function(*args, **kwargs or {})


def _replaced(
    tensor: ReducedGradients, *, op: Any, group: dist.ProcessGroup | None, async_op: bool
) -> bool:
    return not async_op and tensor.over_replicas(tensor, op, group)


def all_reduce_can_be_replaced() -> bool:
    """Whether this torch's ``all_reduce`` honours ``__torch_function__``. Communicates nothing."""
    came = []

    def note(*_: Any) -> bool:
        came.append(True)
        return True

    memory = torch.empty(0, device="cpu").as_subclass(ReducedGradients)
    memory.over_replicas = note
    outsider: Any = dist.GroupMember.NON_GROUP_MEMBER
    dist.all_reduce(memory, group=outsider)
    return bool(came)
