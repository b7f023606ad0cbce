"""Gradients of 8 bits and less: a quarter of the bytes of an exact all-reduce, and below."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup, Hierarchy
from bagua._ops import operations
from bagua._ops.operations import Operation
from bagua.torch_api.algorithms._error_feedback import (
    ErrorFeedbackImpl,
    check_hierarchy,
    warn_of_useless_residuals,
)
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, Groups, Traits
from bagua.torch_api.bucket import BaguaBucket, aligned_buckets

__all__ = [
    "ByteGradAlgorithm",
    "ByteGradAlgorithmImpl",
    "ByteGradFeedbackImpl",
]


@dataclass(eq=False)
class ByteGradAlgorithm(Algorithm):
    """Compressed all-reduce of gradients (Bagua, VLDB 2022, section 3, "ByteGrad").

    Every rank decodes the same bytes, so all ranks hold the same bits afterwards. A bucket of some
    dozens of elements per rank, whose compressed messages would save less than a quarter of the
    bytes, stays exact.

    ``codec="int4_block"`` halves the bytes of the default, and needs no error feedback to train as
    well. Under an adaptive optimizer fewer bits on gradients cost accuracy, with error feedback
    too: send momentum instead (``QAdamAlgorithm``). With ``error_feedback=True`` pass a
    ``GradScaler`` to ``bagua.wrap``: residuals are in unscaled units, and a round that overflows
    leaves them unchanged.

    Args:
        hierarchical: exact inside a node, compressed between the nodes' leaders, so not at all with
            one node; ``"sharded"``: between all ranks, each with a share of a bucket, for nodes
            with several network cards. None: True where there are several nodes with several ranks
            on one, else False.
        average: mean over the ranks; False gives the sum.
        codec: a name of ``bagua._C.codec_names()``. The default has one range per 2048 elements;
            ``"minmax_uint8"`` is Bagua's format, one range per rank's part of a bucket.
        error_feedback: each rank adds to its gradients what compression has taken from those of
            the last step, and likewise to the mean of its part of a bucket. Takes 8 bytes per
            parameter, and 8 / ranks.

    Raises:
        ValueError: unknown codec; error feedback with ``hierarchical="sharded"``.

    Example::

        four_bits = ByteGradAlgorithm(codec="int4_block", error_feedback=True)
        model = bagua.wrap(model, [optimizer], four_bits)
    """

    hierarchical: Hierarchy | None = None
    average: bool = True
    _: KW_ONLY
    codec: str = "block_uint8"
    error_feedback: bool = False

    def __post_init__(self) -> None:
        _C.make_codec(self.codec)
        check_hierarchy("ByteGradAlgorithm", self.hierarchical, self.error_feedback)
        warn_of_useless_residuals("ByteGradAlgorithm", self.codec, self.error_feedback)

    def reify(self, process_group: BaguaProcessGroup) -> AlgorithmImpl:
        if self.error_feedback:
            return ByteGradFeedbackImpl(process_group, self)
        return ByteGradAlgorithmImpl(
            process_group, self.hierarchical, self.average, codec=self.codec
        )


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """Implementation of :class:`ByteGradAlgorithm`."""

    traits = Traits(
        ranks_agree=True,
        reads_grad_scale=False,
        takes_uneven_inputs=True,
        takes_unfrozen=True,
        shares_parameters=True,
    )

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: Hierarchy | None = None,
        average: bool = True,
        *,
        codec: str = "block_uint8",
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = process_group.hierarchy(hierarchical)
        self.average = average
        self.codec = codec

    def tensors_to_buckets(self, tensors: Groups, do_flatten: bool) -> list[BaguaBucket]:
        return aligned_buckets(tensors, do_flatten, self.process_group.size, self._is_large)

    def operations(self, bucket: BaguaBucket) -> list[Operation]:
        operation = bucket.sum_or_mean(
            hierarchical=self.hierarchical,
            average=self.average,
            scattergather=True,
            compression=self.codec if self._is_large(*_kind(bucket)) else None,
            group=self.process_group,
        )
        return [operation]

    def _is_large(self, dtype: torch.dtype, numel: int) -> bool:
        return operations.worth_compressing(
            self.codec, dtype, numel, self.hierarchical, self.process_group
        )


class ByteGradFeedbackImpl(ErrorFeedbackImpl):
    """Implementation of :class:`ByteGradAlgorithm` with error feedback."""

    arguments: ByteGradAlgorithm

    def tensors_to_buckets(self, tensors: Groups, do_flatten: bool) -> list[BaguaBucket]:
        return aligned_buckets(tensors, do_flatten, self.process_group.size, self._is_large)

    def compression(self, bucket: BaguaBucket, outcome: _C.RoundOutcome) -> Operation:
        own = self.arguments
        if not self._is_large(*_kind(bucket)):
            hierarchical = bool(self.hierarchical)
            return operations.exact_mean(bucket, outcome, hierarchical, self.process_group)
        return operations.compressed_all_reduce(
            bucket,
            own.codec,
            self.hierarchical,
            own.average,
            self.process_group,
            outcome=outcome,
        )

    def _is_large(self, dtype: torch.dtype, numel: int) -> bool:
        own = self.arguments
        return not own.average or operations.worth_compressing(
            own.codec, dtype, numel, self.hierarchical, self.process_group
        )


def _kind(bucket: BaguaBucket) -> tuple[torch.dtype, int]:
    return bucket.backend_tensor.dtype, bucket.numel()
