"""Gradients become momenta in place, before another operation averages them.

The momenta are those that all ranks share, or each rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bagua import _C
from bagua._core.compression.error_state import views_of
from bagua._core.compression.two_residuals import Views
from bagua._ops.contract.lane import Lane
from bagua._ops.contract.operation import BucketView, Operation

__all__ = ["LocalMomentum", "UpdateMomentum"]


@dataclass(frozen=True, eq=False)
class UpdateMomentum(Operation):
    """``beta * memory + (1 - beta) * gradient``.

    Attributes:
        memories: per tensor of the bucket, of its shape, dtype and device; only read.
        offsets: of the tensors in the bucket, in elements.
        strides: of the tensors in the bucket.
        betas: one f64 per tensor, on CPU; may be written between two rounds.
    """

    memories: list[torch.Tensor]
    offsets: list[int]
    strides: list[list[int]]
    betas: torch.Tensor

    @classmethod
    def of(
        cls,
        named: Sequence[tuple[str, torch.Tensor]],
        memories: Sequence[torch.Tensor],
        betas: torch.Tensor,
        bucket: str,
    ) -> UpdateMomentum:
        """The operation for the ``named`` views of a bucket.

        Raises:
            ValueError: the memories do not fit the views; names the first.
        """
        if len(memories) != len(named):
            raise ValueError(
                f"bucket '{bucket}': {len(memories)} memories for {len(named)} tensors"
            )
        for (name, view), memory in zip(named, memories, strict=True):
            if (memory.shape, memory.dtype) != (view.shape, view.dtype):
                raise ValueError(
                    f"bucket '{bucket}': the momentum of '{name}' is {memory.dtype} "
                    f"{tuple(memory.shape)}, its gradient is {view.dtype} {tuple(view.shape)}"
                )
        offsets = [int(view.storage_offset()) for _, view in named]
        strides = [list(view.stride()) for _, view in named]
        return cls(list(memories), offsets, strides, betas)

    def describe(self) -> str:
        return "momentum"

    def build(self, lane: Lane, bucket: BucketView) -> _C.BucketOp:
        return _C.UpdateMomentum(
            self.memories, self.offsets, self.strides, self.betas, lane.scratch
        )


@dataclass(frozen=True, eq=False)
class LocalMomentum(Operation):
    """``u <- beta u + (1 - beta) gradient``, of this rank alone (Lin et al., ICLR 2018).

    Attributes:
        memory: u, laid out as the bucket; changes with whole finite rounds.
        offsets: of the tensors in the bucket, in elements.
        betas: one f64 per tensor, on CPU; may be written between two rounds.
    """

    memory: _C.RoundMemory
    offsets: list[int]
    betas: torch.Tensor

    @classmethod
    def like(
        cls,
        flat: torch.Tensor,
        named: Views,
        momenta: Sequence[torch.Tensor],
        betas: torch.Tensor,
        outcome: _C.RoundOutcome,
    ) -> LocalMomentum:
        """The operation for the ``named`` views of a bucket, which begins with ``momenta``.

        Args:
            flat: of the bucket.
            named: (name, place in the bucket) of its tensors.
            momenta: one per tensor, of its shape; copied.
            betas: as of the class.
            outcome: shared with the operation that averages the bucket.
        """
        memory = _C.RoundMemory([torch.zeros_like(flat)], outcome)
        offsets = [int(view.storage_offset()) for _, view in named]
        operation = cls(memory, offsets, betas)
        operation.begin(named, momenta)
        return operation

    def begin(self, named: Views, momenta: Sequence[torch.Tensor]) -> None:
        """Start again with ``momenta``."""
        with torch.no_grad():
            for (_, view), momentum in zip(self.views(named), momenta, strict=True):
                view.copy_(momentum)

    def views(self, named: Views) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, momentum of this rank) of the ``named`` views of the bucket."""
        return views_of(self.memory.value(0), named)

    def describe(self) -> str:
        return "local momentum"

    def build(self, lane: Lane, bucket: BucketView) -> _C.BucketOp:
        return _C.LocalMomentum(self.offsets, self.betas, self.memory)
