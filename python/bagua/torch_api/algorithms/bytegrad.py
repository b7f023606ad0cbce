"""8-bit gradients: about a quarter of the bytes of an exact all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, WrappedModule
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl", "aligned_buckets"]

#: Parts of a bucket begin at multiples of this many elements per rank: 16-byte loads, any dtype.
_ALIGNMENT = 16


def aligned_buckets(
    tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool, ranks: int
) -> list[BaguaBucket]:
    """Buckets that ``ranks`` equal parts fill, from tensors grouped as buckets shall be."""
    return [
        BaguaBucket(group, name=str(i), flatten=do_flatten, alignment=_ALIGNMENT * ranks)
        for i, group in enumerate(tensors)
    ]


class ByteGradAlgorithm(Algorithm):
    """Compressed all-reduce of gradients (Bagua, VLDB 2022, section 3, "ByteGrad").

    Every rank decodes the same bytes, so all ranks hold the same bits afterwards.

    Args:
        hierarchical: exact inside a node, compressed between the nodes' leaders. When all ranks
            share one node nothing is compressed.
        average: mean over the ranks; False gives the sum.
        codec: a name of ``bagua._C.codec_names()``. The default has one range per 2048 elements;
            ``"minmax_uint8"`` is Bagua's format, one range per rank's part of a bucket.

    Raises:
        ValueError: unknown codec.
    """

    def __init__(
        self, hierarchical: bool = True, average: bool = True, *, codec: str = "block_uint8"
    ) -> None:
        _C.make_codec(codec)
        self.hierarchical = hierarchical
        self.average = average
        self.codec = codec

    def reify(self, process_group: BaguaProcessGroup) -> ByteGradAlgorithmImpl:
        return ByteGradAlgorithmImpl(
            process_group, self.hierarchical, self.average, codec=self.codec
        )


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """Implementation of :class:`ByteGradAlgorithm`."""

    ranks_agree = True
    reads_grad_scale = False
    shares_parameters = True
    takes_unfrozen = True
    takes_uneven_inputs = True

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool = True,
        average: bool = True,
        *,
        codec: str = "block_uint8",
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.average = average
        self.codec = codec

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        return aligned_buckets(tensors, do_flatten, self.process_group.size)

    def init_operations(self, bagua_ddp: WrappedModule, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(
            hierarchical=self.hierarchical,
            average=self.average,
            scattergather=True,
            compression=self.codec,
            group=self.process_group,
        )
