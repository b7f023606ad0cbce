"""Collectives that torch's FSDP2 calls in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from bagua.fsdp import Handle

_GATHERING = "gathering the weights"
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Collective:
    """Collective of one module, by a codec or by torch; keeps the handle alive."""

    def __init__(self, handle: Handle, module: str, compressed: bool) -> None:
        self._handle = handle
        self._module = module
        self._compressed = compressed

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ReduceScatter(_Collective):
    """Sums or averages the gradients of a module; every rank gets its shard.

    With hybrid sharding the shards are then reduced over the replicas, in the memory that
    ``allocate`` has returned.
    """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        memory = super().allocate(size, dtype=dtype, device=device)
        if not self._handle.has_replicas:
            return memory
        reduced = memory.as_subclass(ReducedGradients)
        reduced.over_replicas = self._over_replicas
        return reduced

    def _over_replicas(self, flat: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> bool:
        if not self._handle.is_of_replicas(group):
            return False  # of a hook that the user has set
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(
                f"bagua.fsdp: the reduction {op} of gradients over replicas is neither a sum nor a "
                "mean"
            )
        mean = op == dist.ReduceOp.AVG
        self._handle.all_reduce(self._module, flat, mean)
        return True

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """``output_tensor``: 1-D [n]; ``input_tensor``: 1-D [ranks * n], which is overwritten."""
        if not self._compressed:
            self._handle.multiply(self._module, input_tensor)
            with self._handle.outside_the_lane("reducing the gradients", self._module):
                _reduce_scatter(output_tensor, input_tensor, group=group, op=op)
            return
        divisor = divisor_of(op, group.size())
        self._handle.reduce_scatter(self._module, input_tensor, divisor, group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


class AllGather(_Collective):
    """Gathers the weights of a module from the shards of all ranks, some dtypes by torch always."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """``output_tensor``: 1-D [ranks * n]; ``input_tensor``: 1-D [n], perhaps a part of it."""
        if torch._C._current_graph_task_id() < 0:
            self._handle.rounds.end()
        # torch joins parameters of several dtypes as bytes.
        floating = output_tensor.dtype in _FLOATING
        if not (self._compressed and floating) or self._handle.is_small(input_tensor, 1):
            with self._handle.outside_the_lane(_GATHERING, self._module):
                work: dist.Work | None = _all_gather(
                    output_tensor, input_tensor, group=group, async_op=async_op
                )
            return None if work is None else _Gather(work, self._handle, self._module)
        own = output_tensor.chunk(group.size())[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        self._handle.all_gather(self._module, output_tensor, group)
        return None


class _Gather(dist.Work):
    """A gather of torch's that was begun, whose wait is told."""

    def __init__(self, work: dist.Work, handle: Handle, module: str) -> None:
        super().__init__()
        self._work = work
        self._handle = handle
        self._module = module

    def wait(self, *timeout: timedelta) -> bool:
        with self._handle.outside_the_lane(_GATHERING, self._module):
            return self._work.wait(*timeout)


# torch 2.13's names for what it deprecates.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def divisor_of(op: Any, ranks: int) -> float:
    """The number by which ``op``, a reduction of torch's, divides the sum over ``ranks`` ranks."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return float(ranks)
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]  # also where it has no attribute `factor` yet
        if isinstance(factor, (int, float)) and factor > 0:
            return 1.0 / factor
    raise NotImplementedError(
        f"bagua.fsdp: the reduction {op} of gradients is neither a sum nor a mean, nor a sum times "
        "a positive number; call model.set_force_sum_reduction_for_comms(True)"
    )


class ReducedGradients(torch.Tensor):
    """Memory in which torch's FSDP2 reduces the gradients of a module.

    With hybrid sharding FSDP2 calls ``torch.distributed.all_reduce``, which honours
    ``__torch_function__``, on the memory that the module's custom reduce-scatter has allocated.
    ``over_replicas`` is called with its arguments, and returns whether it has done it, or torch is
    to.
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
