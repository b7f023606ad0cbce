"""Tensors as low-rank matrices: which of them, and of which rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bagua._core.state.ledger import Matrices

__all__ = ["check_compression_rate", "low_rank_matrices"]


def check_compression_rate(min_compression_rate: float) -> None:
    """Raise ValueError for a rate that would make messages larger."""
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
