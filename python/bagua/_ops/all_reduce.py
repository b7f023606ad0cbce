"""Exact sum or mean over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops.contract.lane import Hierarchy, Lane, among
from bagua._ops.contract.operation import Operation

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["AllReduce"]


@dataclass(frozen=True)
class AllReduce(Operation):
    """Sum or mean of the bucket, in its own dtype."""

    hierarchical: Hierarchy
    average: bool
    group: BaguaProcessGroup | None

    takes_shares = True

    def describe(self) -> str:
        return f"hierarchical={self.hierarchical} average={self.average} codec=None"

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        reduce = _C.ReduceOp.AVG if self.average else _C.ReduceOp.SUM
        if not self.hierarchical and bucket.gradients and bucket.owns_memory:
            return _C.AllReduce(lane.communicator(self.group), reduce, bucket.backend_tensor)
        return among(
            lane,
            self.group,
            self.hierarchical,
            lambda members: _C.AllReduce(members, reduce),
            reduce,
        )

    def of_divided(self, group: BaguaProcessGroup) -> tuple[AllReduce, float] | None:
        """The sum of divided gradients."""
        if self.hierarchical or not self.average:
            return None
        return replace(self, average=False), 1.0 / (self.group or group).size
