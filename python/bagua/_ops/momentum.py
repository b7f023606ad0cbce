"""Gradients become momenta in place, before another operation averages them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bagua import _C
from bagua._ops.contract.lane import Lane
from bagua._ops.contract.operation import Operation

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["UpdateMomentum"]


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

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        return _C.UpdateMomentum(
            self.memories, self.offsets, self.strides, self.betas, lane.scratch
        )
