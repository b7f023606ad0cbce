"""The mean over all ranks of some elements: the largest, or others at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagua import _C
from bagua._core.compression.sparse_choice import sparse_mean
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Page
from bagua._ops.contract.lane import Lane, among
from bagua._ops.contract.operation import Operation

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["Sparse"]


@dataclass(frozen=True, eq=False)
class Sparse(Operation):
    """``k`` elements of the bucket are averaged, the others become zero.

    Attributes:
        page: its state.
        codec: of the values that are sent; None: they travel as they are.
    """

    approximates = "mean"

    k: int
    page: Page
    hierarchical: bool
    random_sparse: bool
    seed: int
    group: BaguaProcessGroup | None
    codec: str | None = None

    def remembered(self) -> _C.RoundMemory:
        return self.page.memory

    def describe(self) -> str:
        drawn = f"random seed={self.seed}" if self.random_sparse else "largest"
        feedback = bool(self.page.memory.value(0).numel())
        return (
            f"hierarchical={self.hierarchical} {drawn} {self.k} error_feedback={feedback} "
            f"codec={self.codec}"
        )

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        def sparse(members: _C.CountingCommunicator) -> _C.BucketOp:
            return sparse_mean(
                members,
                lane.scratch,
                bucket.backend_tensor,
                self.k,
                self.page.memory,
                random_sparse=self.random_sparse,
                seed=self.seed,
                codec=self.codec,
            )

        return among(lane, self.group, self.hierarchical, sparse)
