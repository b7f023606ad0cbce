"""Mixing with both neighbours on a ring, through compressed differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bagua import _C
from bagua._core.group import environment
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops.contract.lane import Lane, among_weighted
from bagua._ops.contract.operation import Operation

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["CompressedGossip", "mixing_weights"]


def mixing_weights(sizes: list[int], member: int) -> tuple[float, float]:
    """The weights of the left and the right neighbour of ``member`` on a ring of ``sizes``.

    A third each among equals. Otherwise Metropolis-Hastings: a member takes less from a smaller
    one, so that the mean weighted by size is unchanged.
    """
    own = sizes[member]
    neighbours = (_C.ring_left(member, len(sizes)), _C.ring_right(member, len(sizes)))
    left, right = (min(1.0, sizes[neighbour] / own) / 3 for neighbour in neighbours)
    return left, right


@dataclass(frozen=True, eq=False)
class CompressedGossip(Operation):
    """Each rank sends the compressed difference between its weights and its replica.

    Attributes:
        weight: the neighbours' replica of this rank, bit for bit; f32, one dimension, as long as
            the bucket; changed by the op.
        left_peer_weight: the replica of the left neighbour's ``weight``.
        right_peer_weight: of the right neighbour's.
    """

    approximates = "weights"

    weight: torch.Tensor
    left_peer_weight: torch.Tensor
    right_peer_weight: torch.Tensor
    hierarchical: bool
    codec: str
    group: BaguaProcessGroup | None

    def describe(self) -> str:
        return f"hierarchical={self.hierarchical} ring codec={self.codec}"

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        def on_ring(members: _C.CountingCommunicator, sizes: list[int]) -> _C.BucketOp:
            left, right = mixing_weights(sizes, members.rank)
            codec = _C.make_codec(self.codec, lane.device.type)
            replicas = (self.weight, self.left_peer_weight, self.right_peer_weight)
            checksum = environment.get_checksum()
            return _C.CompressedGossip(
                members, codec, lane.scratch, *replicas, left, right, checksum=checksum
            )

        return among_weighted(lane, self.group, self.hierarchical, on_ring)

    def check(self, bucket: BaguaBucket) -> None:
        """Raise ValueError for an unknown codec, or a replica that does not fit."""
        _C.make_codec(self.codec)
        flat = bucket.backend_tensor
        for name, replica in self.replicas().items():
            if (replica.shape, replica.dtype) != (flat.shape, torch.float32):
                raise ValueError(
                    f"bucket '{bucket.name}': the replica '{name}' is {replica.dtype} "
                    f"{tuple(replica.shape)}, it must be torch.float32 {tuple(flat.shape)}"
                )

    def replicas(self) -> dict[str, torch.Tensor]:
        """All three, by what they are called in a state dict."""
        return {
            "weight": self.weight,
            "left": self.left_peer_weight,
            "right": self.right_peer_weight,
        }
