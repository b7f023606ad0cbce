"""What compressed operations send of a bucket: low-rank matrices, or the largest elements."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.state.ledger import Matrices


def check_compression_rate(min_compression_rate: float) -> None:
    if not min_compression_rate >= 1:
        raise ValueError(f"min_compression_rate={min_compression_rate} must be at least 1")


def low_rank_matrices(
    named: Iterable[tuple[str, torch.Tensor]], rank: int, min_compression_rate: float
) -> Matrices:
    """The views of a bucket that are sent as products of two thin matrices."""
    found = ((name, _matrix(view, rank, min_compression_rate)) for name, view in named)
    return {name: matrix for name, matrix in found if matrix is not None}


def _matrix(
    view: torch.Tensor, rank: int, min_compression_rate: float
) -> tuple[int, int, int, int] | None:
    """``(offset, rows, columns, rank)`` of a dense tensor in its memory; None: send it unchanged.

    Rows are the dimension that comes first in memory (of a convolution's weight its outputs, with
    channels_last too), columns all others. What has only one dimension above 1 is a vector.
    """
    sizes = [(stride, size) for stride, size in zip(view.stride(), view.shape, strict=True)]
    dimensions = sorted((pair for pair in sizes if pair[1] != 1), reverse=True)
    if len(dimensions) < 2 or view.numel() == 0:
        return None
    rows = dimensions[0][1]
    columns = view.numel() // rows
    rank = min(rank, rows, columns)
    if rows * columns <= min_compression_rate * rank * (rows + columns):
        return None
    return int(view.storage_offset()), rows, columns, rank


def check_ratio(ratio: float) -> None:
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

    That is exact, and costs less where P - 1 messages exceed a ring's 2 (P - 1) / P * S bytes.
    """
    numel, ranks = flat.numel(), members.size
    values = torch.promote_types(flat.dtype, torch.float32)
    dense = numel * flat.element_size()
    pays = ranks * _C.sparse_message_bytes(numel, k, values) < 2 * dense
    if ranks == 1 or not pays:
        return _C.ErrorFeedbackAllReduce(members, scratch, numel, memory)
    return _C.Sparse(members, scratch, numel, k, memory, checksum=env.get_checksum())
