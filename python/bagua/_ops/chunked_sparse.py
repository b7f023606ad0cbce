"""The mean over all ranks of the largest elements of each chunk, in two bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bagua import _C
from bagua._core.compression.error_state import new_memory
from bagua._core.group import environment
from bagua._core.group.process_group import BaguaProcessGroup
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
        memory: residuals, as long as the bucket, and the number of communications.
    """

    k: int
    decay: float
    memory: _C.RoundMemory
    group: BaguaProcessGroup | None

    @classmethod
    def with_zero_residuals(
        cls,
        bucket: BaguaBucket,
        k: int,
        decay: float,
        outcome: _C.RoundOutcome,
        group: BaguaProcessGroup,
    ) -> ChunkedSparse:
        """The operation for ``bucket``, of float32 or float64 on the CPU.

        ``outcome``: one for all buckets whose residuals change together.
        """
        count = torch.zeros(1, dtype=torch.int64, device="cpu")
        memory = new_memory(bucket.backend_tensor, outcome, count, error_feedback=True)
        return cls(k, decay, memory, group)

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
                memory=self.memory,
                checksum=environment.get_checksum(),
            )

        return among(lane, self.group, False, sparse)
