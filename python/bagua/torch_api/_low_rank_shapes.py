"""Which tensors are sent as low-rank matrices, and how they lie in memory."""

from __future__ import annotations

import torch

__all__ = ["low_rank_matrix"]


def low_rank_matrix(
    view: torch.Tensor, rank: int, min_compression_rate: float
) -> tuple[int, int, int, int] | None:
    """``(offset, rows, columns, rank)`` of a dense tensor in its memory; None: send it as it is.

    Rows are the dimension that comes first in memory (of a convolution's weight its outputs, with
    channels_last too), columns all others. Dimensions of size 1 do not count, so what has only one
    other is a vector. A matrix that its factors do not make ``min_compression_rate`` times smaller
    is sent as it is.
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
