"""A fragment whose anchors are each rank's own, and meet in pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bagua._sync.outer.outer_sgd import OuterSGD
from bagua._sync.outer.weights.fragment import Fragment, OuterNumbers
from bagua._sync.wrapper import Bucket

__all__ = ["Meetings", "PairFragment"]


@dataclass(frozen=True)
class Meetings:
    """Random pairs of ranks, equal on all of them.

    With peers in a fixed order, as of ``shift_one`` by itself, momentum and the order's period
    resonate: the anchors of 5, 7, 10 or more ranks drift apart without bound.

    Attributes:
        seed: of the pairs.
        communications: rounds so far, one int64 on the CPU.
        drawn: the step that ``bagua._C.shift_one_peer`` gives this round's peers for; one int64 on
            the CPU.
    """

    seed: int
    communications: torch.Tensor
    drawn: torch.Tensor

    def draw(self) -> None:
        """Choose the peers of the next round."""
        text = f"{self.seed} {int(self.communications)}".encode()
        digest = hashlib.blake2b(text, digest_size=4).digest()
        self.drawn.fill_(int.from_bytes(digest, "little") >> 1)


class PairFragment(Fragment):
    """The outer state of NoLoCo: ranks send their weights, in the anchor's precision.

    The mean ``y`` of two ranks gives the pseudo-gradient ``a - y`` of each, with its own anchor
    ``a``, which is what draws the anchors together.

    Args:
        meetings: of the operation that averages the buckets.
    """

    def __init__(self, part: int, buckets: Sequence[Bucket], meetings: Meetings) -> None:
        super().__init__(part, buckets, keeps=False)
        self._meetings = meetings

    def launch(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Fill the buckets with the anchor minus the pseudo-gradients, and draw the peers."""
        self._meetings.draw()
        super().launch(weights)
        self._subtract_from_anchors()

    def arrive(self, rule: OuterSGD, clip: float | None) -> OuterNumbers | None:
        """Make the outer step with the pair's mean."""
        self._subtract_from_anchors()
        return super().arrive(rule, clip)

    def _subtract_from_anchors(self) -> None:
        for anchor, flat in zip(self._anchors, self._means, strict=True):
            torch.sub(anchor, flat, out=flat)
