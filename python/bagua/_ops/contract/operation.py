"""The description of a bucket operation, from which the C++ op is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops.contract.lane import Lane

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["Operation", "Sent"]

#: What a guard can compare: the mean of what the ranks put in, or weights of their own.
Sent = Literal["mean", "weights"]


class Operation:
    """One operation of a bucket; a subclass per kind, complete after construction.

    Attributes:
        result: where the values end up; None: in the bucket.
        one_order: whether all ranks must run the module's buckets one after the other.
        takes_shares: whether it can be ``hierarchical="sharded"``, on a part of the bucket.
        approximates: what a guard can compare; None: nothing, it is exact or of another kind.
    """

    result: torch.Tensor | None = None
    one_order: bool = False
    takes_shares: bool = False
    approximates: Sent | None = None

    def check(self, bucket: BaguaBucket) -> None:
        """Raise ValueError, naming the bucket, unless the operation fits it."""

    def remembered(self) -> _C.RoundMemory | None:
        """The memory of error feedback: its first tensor is the residual, or empty."""
        return None

    def describe(self) -> str:
        """One line, equal on all ranks: a part of the plan's fingerprint."""
        raise NotImplementedError

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        """The C++ op. Every rank of the group calls it, in the same order: it may connect."""
        raise NotImplementedError

    def of_divided(self, group: BaguaProcessGroup) -> tuple[Operation, float] | None:
        """An operation with equal result for gradients scaled on their way into the bucket.

        Args:
            group: where the operation names none.

        Returns:
            (operation, factor); None: there is no such operation.
        """
        return None
