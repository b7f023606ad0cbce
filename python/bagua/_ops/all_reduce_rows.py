"""Exact sum or mean over all ranks of a gradient that holds some rows only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops.contract.lane import Lane
from bagua._ops.contract.operation import Operation

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["AllReduceRows"]


@dataclass(frozen=True, eq=False)
class AllReduceRows(Operation):
    """Rows are gathered from all ranks and added.

    Attributes:
        gradient: shared by the slot and the C++ op.
        sizes: of the parameter, the number of rows first.
    """

    gradient: _C.SparseGradient
    sizes: list[int]
    average: bool
    group: BaguaProcessGroup | None

    def describe(self) -> str:
        return f"rows {self.sizes} average={self.average}"

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        reduce = _C.ReduceOp.AVG if self.average else _C.ReduceOp.SUM
        everyone = lane.communicator(self.group)
        return _C.AllReduceRows(everyone, lane.scratch, self.gradient, self.sizes, reduce)
