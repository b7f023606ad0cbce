"""Flattening lists of tensors, and orthonormal columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from bagua import _C

__all__ = ["orthogonalize", "pack_tensors", "unpack_tensors"]


@torch.no_grad()
def orthogonalize(matrix: torch.Tensor, eps: float | torch.Tensor = 1e-16) -> None:
    """Make the columns of a matrix orthonormal, in place and in their order.

    Column i becomes a unit vector in the span of columns 0 to i, orthogonal to those before. A
    column that is zero, or depends on those before it to within 1e-10 of its length, becomes zero:
    Q Q^T is the projection on the columns' span whatever their rank. NaN or infinity anywhere makes
    the whole result NaN. Modified Gram-Schmidt in f64 for any floating dtype, each column projected
    twice (``_C.orthonormalise``); on any device, without waiting for it.

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
    if matrix.numel() == 0:
        return

    columns = matrix.T.contiguous()
    finite = columns.isfinite().all()
    counts = columns.abs().amax(1, keepdim=True) > float(eps)
    columns = torch.where(counts & finite, columns, 0)
    _C.orthonormalise(columns[None])
    matrix.copy_(torch.where(finite, columns, torch.nan).T)


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
