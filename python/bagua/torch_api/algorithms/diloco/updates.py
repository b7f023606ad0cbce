"""Compressed updates: ranks step by themselves, and average after each step what it has changed."""

from __future__ import annotations

from typing import Literal

from bagua._sync.outer.outer_sgd import OuterSGD
from bagua.torch_api.algorithms._error_feedback import BorrowedMeans, ErrorFeedbackImpl
from bagua.torch_api.algorithms.diloco.diloco import DiLoCoAlgorithm, DiLoCoAlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["Compressed", "CompressedUpdatesImpl", "check_compressed"]

#: The values that an algorithm with error feedback compresses.
Compressed = Literal["gradients", "updates"]


def check_compressed(of: str) -> None:
    """Raise ValueError for another word."""
    if of not in ("gradients", "updates"):
        raise ValueError(f'of={of!r} must be "gradients" or "updates"')


class CompressedUpdatesImpl(DiLoCoAlgorithmImpl):
    """Outer rounds of one step each, whose pseudo-gradients are compressed with error feedback.

    Every optimizer steps with its rank's own gradients, and its moments are never sent. Then the
    weights become what they were before the step, plus the mean of what the ranks have sent: equal
    on all ranks. Floating buffers get their mean after every step. Its state is that of
    :class:`DiLoCoAlgorithmImpl`, with ``compressions``, the compressed rounds, and further state of
    the compression.

    Args:
        owner: the algorithm's name in errors.
        compression: of the updates. It gives ``hierarchical`` and ``warmup_steps`` too.
    """

    def __init__(self, owner: str, compression: ErrorFeedbackImpl) -> None:
        self.owner = owner
        self._compression = compression
        arguments = DiLoCoAlgorithm(
            OuterSGD(1.0, momentum=0.0),
            interval=1,
            hierarchical=compression.hierarchical,
            warmup_steps=compression.warmup_steps,
        )
        super().__init__(compression.process_group, arguments)

    def make_means(self) -> BorrowedMeans:
        return BorrowedMeans(self._compression)

    def append_mean(self, bucket: BaguaBucket) -> None:
        if self._plan.of(bucket.tensors[0]) is None:  # a bucket of buffers
            super().append_mean(bucket)
            return
        assert isinstance(self._means, BorrowedMeans)
        self._means.append_to(bucket)
