"""The mean over all ranks of the largest elements of each chunk, in two bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagua import _C
from bagua._core.group import environment
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Page
from bagua._ops.contract.lane import Lane, among
from bagua._ops.contract.operation import Operation

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["ChunkedSparse"]


@dataclass(frozen=True, eq=False)
class ChunkedSparse(Operation):
    """``k`` of each 4096 elements of the bucket are averaged, the others become zero.

    Attributes:
        decay: of the residual, from one round to the next.
        page: its state.
    """

    k: int
    decay: float
    page: Page
    group: BaguaProcessGroup | None

    def describe(self) -> str:
        return f"largest {self.k} of {_C.SPARSE_CHUNK_NUMEL} decay={self.decay}"

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        padding = 0 if bucket.padding_tensor is None else bucket.padding_tensor.numel()

        def sparse(members: _C.CountingCommunicator) -> _C.BucketOp:
            return _C.ChunkedSparse(
                members,
                lane.scratch,
                k=self.k,
                decay=self.decay,
                numel=bucket.backend_tensor.numel() - padding,
                memory=self.page.memory,
                checksum=environment.get_checksum(),
            )

        return among(lane, self.group, False, sparse)
