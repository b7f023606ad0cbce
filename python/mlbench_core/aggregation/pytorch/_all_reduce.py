"""Aggregation by an all_reduce over all ranks."""

from __future__ import annotations

import math

import torch
from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.group.process_group import BaguaProcessGroup

from mlbench_core.aggregation.pytorch.aggregation import (
    Aggregation,
    Denominator,
    canonical_op,
)

AVG_WORLD = "avg_world"
AVG_CUSTOM = "avg_custom"
ALLREDUCE_AGGREGATION_OPS = [AVG_WORLD, AVG_CUSTOM, "sum", "min", "max"]

_AVERAGES = (AVG_WORLD, AVG_CUSTOM)
_REDUCTIONS = {"sum": _C.ReduceOp.SUM, "min": _C.ReduceOp.MIN, "max": _C.ReduceOp.MAX}


class AllReduceAggregation(Aggregation):
    """Sums, averages, or takes the minimum or maximum over ranks; all hold the same bits.

    ``avg_world`` (``avg``) is the sum over the number of ranks, ``avg_custom`` (``custom_avg``) the
    sum over ``denom``: a number or a tensor of one element, the same on all ranks. Integers have
    ``sum``, ``min`` and ``max`` only, booleans ``min`` and ``max``.

    Args:
        world_size: number of ranks; the first aggregation checks it.
        divide_before: divide before the sum, so that it does not overflow in half precision.
        use_cuda: communicate CUDA tensors directly; otherwise through CPU memory.
        process_group: default: all ranks.

    Raises:
        ValueError: ``world_size`` is not a positive integer, or, at the first aggregation, not the
            number of ranks. At any: the denominator is missing, not finite, zero or more than one
            element.
        NotImplementedError: at an aggregation: no such operation.
    """

    def __init__(
        self,
        world_size: int,
        divide_before: bool = False,
        use_cuda: bool = False,
        *,
        process_group: BaguaProcessGroup | None = None,
    ) -> None:
        # Checks
        if not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size must be a positive integer, not {world_size!r}")

        super().__init__(use_cuda=use_cuda, process_group=process_group)
        self.world_size = world_size
        self.divide_before = divide_before

    def _check(self, op: str, denom: Denominator) -> None:
        if canonical_op(op) == AVG_CUSTOM:
            _number(denom)

    def _check_group(self, connections: Connections) -> None:
        if connections.size != self.world_size:
            raise ValueError(
                f"{type(self).__name__} was made with world_size={self.world_size}, but its group "
                f"has {connections.size} rank(s); pass torch.distributed.get_world_size()"
            )

    def _describe(self, op: str, denom: Denominator) -> list[str]:
        name = canonical_op(op)
        custom = [f"denom {_number(denom)!r}"] if name == AVG_CUSTOM else []
        return [f"op {name}", f"divide_before {self.divide_before}", *custom]

    def _expected_size(self) -> int | None:
        return self.world_size

    def _refusal(self, dtype: torch.dtype, op: str) -> str:
        name = canonical_op(op)
        if name in _AVERAGES and not dtype.is_floating_point:
            return f"{dtype} has no {name}; use sum, min or max, or convert it to floating point"
        if name == "sum" and dtype == torch.bool:
            return "booleans have no sum; use max (any) or min (all)"
        return ""

    def _agg(self, data: torch.Tensor, op: str, denom: Denominator = None) -> torch.Tensor:
        # Checks
        self._check(op, denom)
        if reason := self._refusal(data.dtype, op):
            raise ValueError(f"{type(self).__name__}: {reason}")

        name = canonical_op(op)
        divisor = 1.0
        if name in _AVERAGES:
            divisor = _number(denom) if name == AVG_CUSTOM else float(self.world_size)
        if divisor != 1.0 and self.divide_before:
            data.div_(divisor)
        reduction = _REDUCTIONS.get(name, _C.ReduceOp.SUM)
        self._communicator("data", data.device).all_reduce(data, reduction)
        if divisor != 1.0 and not self.divide_before:
            data.div_(divisor)
        return data


def _number(denom: Denominator) -> float:
    """The denominator as a number that one can divide by, or ValueError."""
    remedy = "pass a number other than zero, or a tensor of one, the same on all ranks"
    if denom is None:
        raise ValueError(f"op={AVG_CUSTOM!r} needs a denominator: {remedy}")
    if isinstance(denom, torch.Tensor) and denom.numel() != 1:
        raise ValueError(f"the denominator has {denom.numel()} elements: {remedy}")
    value = float(denom)
    if value == 0 or not math.isfinite(value):
        raise ValueError(f"the denominator is {value}: {remedy}")
    return value
