"""A guard's view of one bucket: samples of its operation, and exact ones beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol

import torch

from bagua import _C

__all__ = ["BucketWatch", "mean_of_weights", "with_exact"]

Members = ParamSpec("Members")


class BucketWatch:
    """The C++ ops of one bucket that a guard asks and switches.

    Attributes:
        sampled: around the bucket's last op; None before the engine is built.
        fallbacks: with an exact op each; none on a rank that takes no part between nodes.
    """

    def __init__(self) -> None:
        self.sampled: _C.Sampled | None = None
        self.fallbacks: list[_C.Fallback] = []

    def around(self, op: _C.BucketOp) -> _C.BucketOp:
        """``op``, of which samples can be taken."""
        self.sampled = _C.Sampled(op)
        return self.sampled

    def use_exact(self, exact: bool) -> None:
        """Have the next rounds of the bucket be exact, or not. All ranks call it alike."""
        for fallback in self.fallbacks:
            fallback.use_other(exact)


class Watched(Protocol):
    """A bucket that may have a watch."""

    watch: BucketWatch | None


def with_exact(
    bucket: Watched,
    usual: Callable[Members, _C.BucketOp],
    exact: Callable[Members, _C.BucketOp],
) -> Callable[Members, _C.BucketOp]:
    """A maker of ops: ``usual``, or where the bucket is watched both, of which one runs."""
    watch = bucket.watch
    if watch is None:
        return usual

    def both(*args: Members.args, **kwargs: Members.kwargs) -> _C.BucketOp:
        fallback = _C.Fallback(usual(*args, **kwargs), exact(*args, **kwargs))
        watch.fallbacks.append(fallback)
        return fallback

    return both


def mean_of_weights(
    members: _C.CountingCommunicator, sizes: list[int], replicas: list[torch.Tensor]
) -> _C.BucketOp:
    """The exact mean of weights over ``members``, which stand for ``sizes`` ranks.

    ``replicas``: those that members keep of each other, which become the mean.
    """
    share = sizes[members.rank] * len(sizes) / sum(sizes)
    return _C.MeanOfWeights(members, share, replicas)
