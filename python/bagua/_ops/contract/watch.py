"""A guard's view of one bucket: samples of its operation, and the ones beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol

import torch

from bagua import _C

__all__ = ["EIGHT_BITS", "BucketWatch", "mean_of_weights", "with_exact"]

#: The codec of the operation of 8 bits beside one of fewer.
EIGHT_BITS = "block_uint8"

Members = ParamSpec("Members")


class BucketWatch:
    """The C++ ops of one bucket that a guard asks and switches.

    Attributes:
        sampled: around the bucket's last op; None before the engine is built.
        eight_bits: each with an op of 8 bits; none where the usual one has as many bits.
        exact: each with an exact op, which comes before those of 8 bits. Both are empty on a rank
            that takes no part between nodes.
    """

    def __init__(self) -> None:
        self.sampled: _C.Sampled | None = None
        self.eight_bits: list[_C.Fallback] = []
        self.exact: list[_C.Fallback] = []

    def around(self, op: _C.BucketOp) -> _C.BucketOp:
        """``op``, of which samples can be taken."""
        self.sampled = _C.Sampled(op)
        return self.sampled

    def use(self, *, exact: bool, eight_bits: bool) -> None:
        """Have the next rounds of the bucket be exact, or in 8 bits, or as usual.

        All ranks call it alike.
        """
        for fallback in self.exact:
            fallback.use_other(exact)
        for fallback in self.eight_bits:
            fallback.use_other(eight_bits)


class Watched(Protocol):
    """A bucket that may have a watch."""

    watch: BucketWatch | None


def with_exact(
    bucket: Watched,
    usual: Callable[Members, _C.BucketOp],
    exact: Callable[Members, _C.BucketOp],
    eight_bits: Callable[Members, _C.BucketOp] | None = None,
) -> Callable[Members, _C.BucketOp]:
    """A maker of ops: ``usual``, or where the bucket is watched all of them, of which one runs.

    ``eight_bits``: None where the usual one has as many bits, or is of another kind.
    """
    watch = bucket.watch
    if watch is None:
        return usual

    def all_of_them(*args: Members.args, **kwargs: Members.kwargs) -> _C.BucketOp:
        op = usual(*args, **kwargs)
        if eight_bits is not None:
            op = _C.Fallback(op, eight_bits(*args, **kwargs))
            watch.eight_bits.append(op)
        op = _C.Fallback(op, exact(*args, **kwargs))
        watch.exact.append(op)
        return op

    return all_of_them


def mean_of_weights(
    members: _C.CountingCommunicator, sizes: list[int], replicas: list[torch.Tensor]
) -> _C.BucketOp:
    """The exact mean of weights over ``members``, which stand for ``sizes`` ranks.

    ``replicas``: those that members keep of each other, which become the mean.
    """
    share = sizes[members.rank] * len(sizes) / sum(sizes)
    return _C.MeanOfWeights(members, share, replicas)
