"""The share of each rank in the mean of an outer round."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import torch

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._sync.outer.weights import Fragment

__all__ = ["EqualShares", "SampleShares"]


class EqualShares:
    """All ranks count alike."""

    def count(self, samples: int) -> None:
        """This rank has trained on so many more."""

    def weigh(self, fragment: Fragment) -> None:
        """Scale what ``fragment`` has launched. All ranks call it."""

    def settle(self, part: int) -> None:
        """The last round of a fragment has been made: its samples are in the anchor."""

    def take_over(self, before: EqualShares) -> None:
        """Take this rank's counts from the plan before."""

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of this rank's; writes into the tensors take effect."""
        yield from ()


class SampleShares(EqualShares):
    """Weighs pseudo-gradients by the squares of the samples that ranks have trained on.

    A rank of weight w scales its pseudo-gradients by w P / sum of w, so that the mean of P ranks is
    the weighted one. With equal weights that is 1.

    Args:
        connections: of the ranks.
        name: of the module, for errors.
        fragments: their number.
    """

    def __init__(self, connections: Connections, name: str, fragments: int) -> None:
        self._connections = connections
        self._name = name
        # By fragment: samples since its last round, and those of the round under way.
        self._samples = torch.zeros(fragments, 2, dtype=torch.int64, device="cpu")

    def count(self, samples: int) -> None:
        """This rank has trained on so many more."""
        self._samples[:, 0] += samples

    def weigh(self, fragment: Fragment) -> None:
        """Scale what ``fragment`` has launched. All ranks call it.

        Raises:
            BaguaError: another rank failed; no rank has counted samples.
        """
        own = int(self._samples[fragment.part, 0])
        self._samples[fragment.part, 1] = own
        counted = self._connections.gather_numbers("weighing an outer round", own)
        total = sum(number**2 for number in counted)
        if total == 0:
            raise _C.BaguaError(
                f"module '{self._name}': weight=\"samples\", but no rank has counted any since the "
                "last round: call model.bagua_algorithm.count_samples() in each step"
            )
        fragment.scale(float(Fraction(own**2 * len(counted), total)))

    def settle(self, part: int) -> None:
        """The last round of a fragment has been made: its samples are in the anchor."""
        self._samples[part, 0] -= self._samples[part, 1]
        self._samples[part, 1] = 0

    def take_over(self, before: EqualShares) -> None:
        """Take this rank's counts from the plan before."""
        assert isinstance(before, SampleShares)
        self._samples.copy_(before._samples)

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of this rank's; writes into the tensors take effect."""
        yield "samples", self._samples
