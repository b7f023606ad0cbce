"""The exact mean that stands in for a compressed one."""

from __future__ import annotations

import torch

from bagua import _C
from bagua._ops.contract.lane import Lane

__all__ = ["codec_of_scatter_gather", "exact_mean"]


def codec_of_scatter_gather(dtype: torch.dtype) -> str | None:
    """The codec that loses nothing of ``dtype`` and sums in f32; None where none is needed."""
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype)


def exact_mean(
    members: _C.CountingCommunicator,
    lane: Lane,
    dtype: torch.dtype,
    reduce: _C.ReduceOp = _C.ReduceOp.AVG,
    memory: _C.RoundMemory | None = None,
    part: tuple[int, int, int] | None = None,
) -> _C.BucketOp:
    """Sum or mean over ``members`` in at least f32.

    Args:
        members: who takes part.
        lane: that runs it.
        dtype: of the bucket.
        reduce: sum or mean.
        memory: of the op that it stands in for: residuals are added, and become zero.
        part: a second residual in it, (tensor, first element, number of parts).
    """
    codec = codec_of_scatter_gather(dtype)
    op: _C.BucketOp
    if codec is None:
        op = _C.AllReduce(members, reduce)
    else:
        made = _C.make_codec(codec, lane.device.type)
        op = _C.CompressedAllReduce(members, made, lane.scratch, reduce)
    return op if memory is None else _C.SettleResiduals(op, memory, part)
