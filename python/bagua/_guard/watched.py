"""A bucket that a guard watches, and its sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from bagua._guard.sample import Sample, sample_of_mean, sample_of_weights
from bagua._ops.contract.operation import Operation
from bagua._ops.contract.watch import BucketWatch

__all__ = ["Bucket", "Watched"]


class Bucket(Protocol):
    """A bucket, as a guard sees it."""

    name: str
    backend_tensor: torch.Tensor
    padding_tensor: torch.Tensor | None
    tensors: list[torch.Tensor]
    flatten: bool
    ops: list[Operation]
    watch: BucketWatch | None

    def flattened_tensor(self) -> torch.Tensor: ...


@dataclass(eq=False)
class Watched:
    """A bucket whose last operation approximates something.

    Attributes:
        names: of its tensors.
        exact_until: the first round in which the bucket is not exact again; 0: it never was.
        eight_bits_until: the first round in which it is not in 8 bits again; 0: it never was.
        since: the first round with the op that runs now.
        exact: whether the bucket is exact now.
        eight_bits: whether it is in 8 bits now, instead of fewer.
        places: of the sample that was asked for; None: none was.
        suspected: the figures that were above their thresholds in the last sample.
        figures: the last ones.
    """

    bucket: Bucket
    watch: BucketWatch
    operation: Operation
    names: list[str]
    exact_until: int = 0
    eight_bits_until: int = 0
    since: int = 0
    exact: bool = False
    eight_bits: bool = False
    places: torch.Tensor | None = None
    suspected: frozenset[str] = frozenset()
    figures: Mapping[str, float] | None = None

    def take_sample(self) -> Sample:
        """The sample that was asked for; its figures are unknown if no round has run since."""
        places, self.places = self.places, None
        assert places is not None
        bucket, operation = self.bucket, self.operation
        if operation.approximates == "weights":
            flat = bucket.backend_tensor if bucket.flatten else bucket.flattened_tensor()
            return sample_of_weights(flat, places)
        taken = None if self.watch.sampled is None else self.watch.sampled.take()
        if taken is None:
            return Sample.nothing(places)
        averages = getattr(operation, "average", True)
        return sample_of_mean(taken, operation.remembered(), places, averages)
