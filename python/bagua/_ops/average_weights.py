"""The mean of weights with all ranks or with one peer, in a memory beside the bucket's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops.contract.lane import Lane, among, among_weighted
from bagua._ops.contract.operation import Operation

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["AverageWeights", "check_peer_selection_mode"]

#: Choice of a rank's peers.
_PEER_SELECTION_MODES = ("all", "shift_one")


def check_peer_selection_mode(mode: str) -> None:
    """Raise ValueError, naming ``mode`` and the known ones, if it is none of them."""
    if mode not in _PEER_SELECTION_MODES:
        raise ValueError(
            f"unknown peer_selection_mode '{mode}'; known: {', '.join(_PEER_SELECTION_MODES)}"
        )


def _zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


@dataclass(frozen=True, eq=False)
class AverageWeights(Operation):
    """The mean with all ranks or with one peer; the bucket itself stays as it is.

    Attributes:
        peer_weight: the result; one dimension, as many elements and the dtype of the bucket.
        communications: how often the op has run, one int64, written by the op; whoever goes on
            from a checkpoint sets it before the next communication.

    """

    approximates = "weights"

    peer_weight: torch.Tensor
    hierarchical: bool
    peer_selection_mode: str
    group: BaguaProcessGroup | None
    communications: torch.Tensor = field(default_factory=_zero)

    @property
    def result(self) -> torch.Tensor:  # type: ignore[override]
        return self.peer_weight

    def describe(self) -> str:
        return f"hierarchical={self.hierarchical} peers={self.peer_selection_mode}"

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        averaging = (
            self._with_all(lane) if self.peer_selection_mode == "all" else self._gossip(lane)
        )
        return _C.AverageWeights(self.peer_weight, self.communications, averaging)

    def _with_all(self, lane: Lane) -> _C.BucketOp:
        return among(
            lane,
            self.group,
            self.hierarchical,
            lambda members: _C.AllReduce(members, _C.ReduceOp.AVG),
        )

    def _gossip(self, lane: Lane) -> _C.BucketOp:
        def with_peer(members: _C.CountingCommunicator, sizes: list[int]) -> _C.BucketOp:
            return _C.Gossip(members, self.communications, sizes, lane.scratch)

        return among_weighted(lane, self.group, self.hierarchical, with_peer)

    def check(self, bucket: BaguaBucket) -> None:
        """Raise ValueError for an unknown mode, or a ``peer_weight`` that does not fit."""
        check_peer_selection_mode(self.peer_selection_mode)
        flat, mean = bucket.backend_tensor, self.peer_weight
        if (mean.shape, mean.dtype) != (flat.shape, flat.dtype):
            raise ValueError(
                f"bucket '{bucket.name}': peer_weight is {mean.dtype} {tuple(mean.shape)}, the "
                f"bucket is {flat.dtype} {tuple(flat.shape)}"
            )

    def copy_back_peer_weight(self, bucket: BaguaBucket) -> None:
        """Give the tensors of ``bucket`` the averaged values: after waiting for it."""
        with torch.no_grad():
            bucket.backend_tensor.copy_(self.peer_weight)
        bucket.copy_out()
