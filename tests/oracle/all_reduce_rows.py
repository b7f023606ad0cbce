"""The mean of sparse gradients, row by row, from nothing but their indices and values.

Nothing here calls the library. A gradient is a COO tensor with one sparse dimension, or None.
"""

import torch


def total(gradients, shape):
    """The dense sum over all ranks, in f64 (complex gradients: complex128)."""
    is_complex = any(g is not None and g.is_complex() for g in gradients)
    result = torch.zeros(shape, dtype=torch.complex128 if is_complex else torch.float64)
    for gradient in gradients:
        for row, value in rows_of(gradient):
            result[row] += value.to(result.dtype)
    return result


def mean(gradients, shape):
    """The dense mean over all ranks; who has no gradient counts as zeros."""
    return total(gradients, shape) / len(gradients)


def touched(gradients):
    """The rows of which some rank has a value, in ascending order."""
    return sorted({row for gradient in gradients for row, _ in rows_of(gradient)})


def rows_of(gradient):
    """(row, value) as they stand in the gradient; a row may occur several times."""
    if gradient is None:
        return []
    return list(zip(gradient._indices()[0].tolist(), gradient._values(), strict=True))
