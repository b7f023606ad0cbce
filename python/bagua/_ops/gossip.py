"""The mean of a bucket with one peer, another one in each round, in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops.contract.lane import Lane
from bagua._ops.contract.operation import BucketView, Operation

__all__ = ["Gossip"]


@dataclass(frozen=True, eq=False)
class Gossip(Operation):
    """The mean with the peer of ``bagua._C.shift_one_peer``.

    Attributes:
        communications: the step of that, one int64 on the CPU, equal on all ranks; the caller
            counts, or draws it.
        group: None: of the wrapped module.
    """

    communications: torch.Tensor
    group: BaguaProcessGroup | None

    def describe(self) -> str:
        return "gossip with one peer"

    def build(self, lane: Lane, bucket: BucketView) -> _C.BucketOp:
        members = lane.communicator(self.group)
        return _C.Gossip(members, self.communications, [1] * members.size, lane.scratch)
