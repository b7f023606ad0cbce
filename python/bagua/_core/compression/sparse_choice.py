"""Chooses the number of elements of a bucket that are sent, and the op that sends them."""

from __future__ import annotations

import torch

from bagua import _C
from bagua._core.group import environment as env

__all__ = ["check_ratio", "number_sent", "sparse_mean"]


def check_ratio(ratio: float) -> None:
    """Raise ValueError for what is no part of a whole."""
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio={ratio} must be above 0 and at most 1, the part of the elements")


def number_sent(numel: int, ratio: float) -> int:
    """The elements that are sent of ``numel``: at least one, if there is any."""
    return min(numel, max(1, round(ratio * numel)))


def sparse_mean(
    members: _C.Communicator,
    scratch: _C.Scratch,
    flat: torch.Tensor,
    k: int,
    memory: _C.RoundMemory,
) -> _C.BucketOp:
    """The mean of each rank's ``k`` largest elements of buckets like ``flat``, or of all of them.

    That is exact, and is taken where it costs less: with P members and S bytes of bucket a ring
    sends 2 (P - 1) / P * S, the largest elements P - 1 messages.
    """
    numel, ranks = flat.numel(), members.size
    values = torch.promote_types(flat.dtype, torch.float32)
    dense = numel * flat.element_size()
    pays = ranks * _C.sparse_message_bytes(numel, k, values) < 2 * dense
    if ranks == 1 or not pays:
        return _C.ErrorFeedbackAllReduce(members, scratch, numel, memory)
    return _C.Sparse(members, scratch, numel, k, memory, checksum=env.get_checksum())
