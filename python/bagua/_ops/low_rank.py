"""The mean over all ranks of matrices that are approximated by power iteration (PowerSGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Page
from bagua._ops.contract.lane import Lane, among
from bagua._ops.contract.operation import Operation

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["LowRank"]


@dataclass(frozen=True, eq=False)
class LowRank(Operation):
    """Matrices travel as two thin factors, the other elements as they are.

    Attributes:
        page: with the matrices.
    """

    approximates = "mean"

    page: Page
    hierarchical: bool
    warm_start: bool
    error_feedback: bool
    seed: int
    group: BaguaProcessGroup | None

    def remembered(self) -> _C.RoundMemory:
        return self.page.memory

    def describe(self) -> str:
        return (
            f"hierarchical={self.hierarchical} low rank {self.page.matrices} "
            f"warm_start={self.warm_start} error_feedback={self.error_feedback} seed={self.seed}"
        )

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        def low_rank(members: _C.CountingCommunicator) -> _C.BucketOp:
            return _C.LowRank(
                members,
                lane.scratch,
                bucket.backend_tensor.numel(),
                list(self.page.matrices.values()),
                warm_start=self.warm_start,
                error_feedback=self.error_feedback,
                seed=self.seed,
                memory=self.page.memory,
            )

        return among(lane, self.group, self.hierarchical, low_rank)
