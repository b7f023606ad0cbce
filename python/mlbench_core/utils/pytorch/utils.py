"""Flattening lists of tensors, and orthonormal columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

__all__ = ["orthogonalize", "pack_tensors", "unpack_tensors"]

# A column of which less than this many units of rounding remains is in the span of the others.
_ROUNDINGS = 64


@torch.no_grad()
def orthogonalize(matrix: torch.Tensor, eps: float | torch.Tensor = 1e-16) -> None:
    """Make the columns of a matrix orthonormal, in place and in their order.

    Column i becomes a unit vector in the span of columns 0 to i, orthogonal to those before. A
    column that is zero, or adds nothing to those before it, becomes zero instead of noise: Q Q^T is
    the projection on the columns' span whatever their rank. Works in f32 (f64 for f64) for any
    floating dtype and on any device, without waiting for the device. NaN and infinity spoil their
    column and those after it.

    Gram-Schmidt with repeated projections (L. Giraud, J. Langou, M. Rozložník, *The loss of
    orthogonality in the Gram-Schmidt orthogonalization process*, Computers & Mathematics with
    Applications 50(7), 2005).

    Args:
        matrix: of shape (rows, columns), floating point.
        eps: a column whose largest element is not above it counts as zero.

    Raises:
        ValueError: it is no matrix of floating-point numbers.
    """
    # Checks
    if matrix.dim() != 2 or not matrix.is_floating_point():
        raise ValueError(
            "orthogonalize needs a matrix of floating-point numbers, not "
            f"{list(matrix.shape)} of {matrix.dtype}"
        )

    wide = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    q = matrix.to(wide, copy=True)
    negligible = _ROUNDINGS * torch.finfo(wide).eps
    floor = float(eps)
    for i in range(q.shape[1] if q.numel() > 0 else 0):
        before = q[:, :i]
        # 1. To unit length, by way of its largest element: squares of tiny or huge ones are lost.
        largest = q[:, i].abs().amax()
        column = _divided(q[:, i], largest, floor)
        column = _divided(column, torch.linalg.vector_norm(column), 0.0)
        # 2. What the columns before do not span, which is zero if nothing but rounding is left. Two
        #    times: sums over long columns are not exact, and the first leaves what they missed.
        column = _rest(_rest(column, before), before)
        column = _divided(column, torch.linalg.vector_norm(column), negligible)
        # 3. Once more: the division blew up what rounding had left along the others.
        column = _rest(column, before)
        q[:, i] = _divided(column, torch.linalg.vector_norm(column), 0.0)
    matrix.copy_(q)


def _rest(column: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The column without its projection on orthonormal ones."""
    return column - before @ (before.T @ column)


def _divided(column: torch.Tensor, length: torch.Tensor, floor: float) -> torch.Tensor:
    """``column / length``, and zero where the length is not above the floor."""
    return torch.where(length <= floor, torch.zeros_like(column), column / length)


def pack_tensors(
    tensors: Sequence[torch.Tensor], use_cuda: bool = False
) -> tuple[torch.Tensor, list[int], list[torch.Size]]:
    """Copy tensors into one flat tensor.

    Args:
        tensors: of one dtype, of any shape and layout in memory.
        use_cuda: CUDA tensors make a CUDA tensor, on the device of the first; otherwise the result
            is in CPU memory.

    Returns:
        The flat tensor; where each tensor begins in it, followed by its length; the shapes.

    Raises:
        ValueError: there are no tensors, or their dtypes differ.
    """
    # Checks
    if len(tensors) == 0:
        raise ValueError("pack_tensors needs at least one tensor: the dtype is not known otherwise")
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    if len(dtypes) > 1:
        raise ValueError(f"pack_tensors needs tensors of one dtype, not {dtypes}; pack each alone")

    indices = [0]
    for tensor in tensors:
        indices.append(indices[-1] + tensor.numel())
    first = tensors[0]
    device = first.device if first.is_cuda and use_cuda else torch.device("cpu")
    flat = torch.empty(indices[-1], dtype=first.dtype, device=device)
    for tensor, part in zip(tensors, _parts(flat, indices), strict=True):
        part.view(tensor.shape).copy_(tensor.detach())
    return flat, indices, [tensor.shape for tensor in tensors]


def unpack_tensors(
    aggregated: torch.Tensor, indices: Sequence[int], sizes: Sequence[torch.Size]
) -> list[torch.Tensor]:
    """Views of a flat tensor in the shapes that :func:`pack_tensors` found.

    Args:
        aggregated: of one dimension; the views share its memory.
        indices: where each tensor begins, followed by the length of all.
        sizes: the shape of each.

    Raises:
        ValueError: these do not belong together.
    """
    # Checks
    if len(indices) != len(sizes) + 1:
        raise ValueError(
            f"unpack_tensors: {len(sizes)} sizes need {len(sizes) + 1} indices, not {len(indices)}"
        )
    if aggregated.dim() != 1 or aggregated.numel() != indices[-1]:
        raise ValueError(
            f"unpack_tensors: indices end at {indices[-1]}, the flat tensor has the shape "
            f"{list(aggregated.shape)}"
        )
    lengths = [torch.Size(size).numel() for size in sizes]
    for i, length in enumerate(lengths):
        if indices[i + 1] - indices[i] != length:
            raise ValueError(
                f"unpack_tensors: tensor {i} of shape {list(sizes[i])} does not fit between "
                f"indices {indices[i]} and {indices[i + 1]}"
            )

    parts = _parts(aggregated, indices)
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


def _parts(flat: torch.Tensor, indices: Sequence[int]) -> list[torch.Tensor]:
    return [flat[begin:end] for begin, end in itertools.pairwise(indices)]
