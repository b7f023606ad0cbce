"""Sum or mean over all ranks of values that a codec compresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bagua import _C
from bagua._core.group import environment
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Page
from bagua._ops.contract.lane import Hierarchy, Lane, among
from bagua._ops.contract.operation import Operation

if TYPE_CHECKING:
    from bagua.torch_api.bucket import BaguaBucket

__all__ = ["CompressedAllReduce", "codec_named", "codec_of_scatter_gather"]

#: Bagua's spelling of its codec.
_ALIASES = {"MinMaxUInt8": "minmax_uint8"}


def codec_of_scatter_gather(dtype: torch.dtype) -> str | None:
    """The codec that loses nothing of ``dtype`` and sums in f32; None where none is needed."""
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype)


def codec_named(compression: str) -> str:
    """The codec that ``compression`` names, in Bagua's spelling or in ours."""
    return _ALIASES.get(compression, compression)


@dataclass(frozen=True)
class CompressedAllReduce(Operation):
    """Sum or mean of the bucket in f32: compressed parts are exchanged twice.

    Attributes:
        page: residuals of the ranks that compress, all of them or the nodes' leaders; None: no
            error feedback. They are of whole buckets: not for ``hierarchical="sharded"``.
    """

    hierarchical: Hierarchy
    average: bool
    codec: str
    group: BaguaProcessGroup | None
    page: Page | None = None

    @classmethod
    def with_error_feedback(
        cls,
        bucket: BaguaBucket,
        codec: str,
        outcome: _C.RoundOutcome,
        group: BaguaProcessGroup,
        *,
        hierarchical: bool = False,
        average: bool = True,
    ) -> CompressedAllReduce:
        """The operation for ``bucket``, of any floating dtype, with residuals of zero.

        ``outcome``: one for all buckets whose residuals change together.
        """
        connections = group.connections
        members = list(range(connections.size))
        if hierarchical:
            members = _C.leaders(connections.node_of_ranks())
        flat, named = bucket.backend_tensor, bucket.named_views()
        page = Page.of_parts(flat, named, outcome, members, connections.rank)
        return cls(hierarchical, average, codec, group, page)

    takes_shares = True
    approximates = "mean"

    def remembered(self) -> _C.RoundMemory | None:
        return None if self.page is None else self.page.memory

    def check(self, bucket: BaguaBucket) -> None:
        """Raise ValueError, with the known codecs, for an unknown one."""
        _C.make_codec(self.codec)

    def describe(self) -> str:
        feedback = "" if self.page is None else " error_feedback=True"
        arguments = f"hierarchical={self.hierarchical} average={self.average} codec={self.codec}"
        return arguments + feedback

    def build(self, lane: Lane, bucket: BaguaBucket) -> _C.BucketOp:
        reduce = _C.ReduceOp.AVG if self.average else _C.ReduceOp.SUM

        memory = self.remembered()
        padding = 0 if bucket.padding_tensor is None else bucket.padding_tensor.numel()

        def compressed(members: _C.CountingCommunicator) -> _C.BucketOp:
            return _C.CompressedAllReduce(
                members,
                _C.make_codec(self.codec, lane.device.type),
                lane.scratch,
                reduce,
                checksum=environment.get_checksum(),
                memory=memory,
                padding=0 if memory is None else padding,
            )

        return among(lane, self.group, self.hierarchical, compressed, reduce)
