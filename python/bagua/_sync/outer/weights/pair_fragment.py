"""A fragment whose anchors are each rank's own, and meet in pairs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagua._sync.outer.outer_sgd import OuterSGD
from bagua._sync.outer.weights.fragment import Fragment, OuterNumbers

__all__ = ["PairFragment"]


class PairFragment(Fragment):
    """The outer state of NoLoCo: ranks send their weights, in the anchor's precision.

    The mean ``y`` of two ranks gives the pseudo-gradient ``a - y`` of each, with its own anchor
    ``a``, which is what draws the anchors together.
    """

    def launch(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Fill the buckets with the anchor minus the pseudo-gradients."""
        super().launch(weights)
        self._subtract_from_anchors()

    def arrive(self, rule: OuterSGD, clip: float | None) -> OuterNumbers | None:
        """Make the outer step with the pair's mean."""
        self._subtract_from_anchors()
        return super().arrive(rule, clip)

    def _subtract_from_anchors(self) -> None:
        for anchor, flat in zip(self._anchors, self._means, strict=True):
            torch.sub(anchor, flat, out=flat)
