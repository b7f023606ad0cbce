"""Tensors as low-rank matrices: selection, layout in memory, and state."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bagua import _C
from bagua._core.compression.error_state import new_memory

__all__ = [
    "Matrices",
    "check_compression_rate",
    "low_rank_matrices",
    "low_rank_memory",
    "queries_of",
]

#: By name of the tensor: (offset, rows, columns, rank) in the bucket.
Matrices = dict[str, tuple[int, int, int, int]]


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


def low_rank_memory(
    flat: torch.Tensor,
    matrices: Matrices,
    outcome: _C.RoundOutcome,
    *,
    error_feedback: bool,
    communications: int = 0,
) -> _C.RoundMemory:
    """A memory for ``_C.LowRank`` on buckets like ``flat``, with ``communications`` behind it."""
    queries = flat.new_zeros(
        sum(columns * rank for _, _, columns, rank in matrices.values()),
        dtype=torch.promote_types(flat.dtype, torch.float32),
    )
    count = torch.full((1,), communications, device="cpu")
    return new_memory(flat, outcome, queries, count, error_feedback=error_feedback)


def queries_of(memory: _C.RoundMemory, matrices: Matrices) -> dict[str, torch.Tensor]:
    """By name of the tensor: (rank, columns). Between rounds; writing into them counts."""
    shapes = [(rank, columns) for _, _, columns, rank in matrices.values()]
    parts = memory.value(1).split([rank * columns for rank, columns in shapes])
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return dict(zip(matrices, views, strict=True))


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
