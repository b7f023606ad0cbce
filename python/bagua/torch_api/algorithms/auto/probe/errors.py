"""The relative error of what compression leaves of real gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bagua import _C

__all__ = ["error_of", "typical_errors"]

_TYPICAL_NUMEL = 2**16


def typical_errors(names: Sequence[str]) -> dict[str, float]:
    """Error of each codec on cubes of normal numbers, which have tails as heavy as gradients."""
    generator = torch.Generator().manual_seed(0)
    cubes = [torch.randn(_TYPICAL_NUMEL, generator=generator, device="cpu") ** 3]
    return {name: error_of(name, cubes) for name in names}


@torch.no_grad()
def error_of(key: str, gradients: Sequence[torch.Tensor]) -> float:
    """Relative L2 error of what the loss ``key`` leaves of the gradients.

    Args:
        key: the name of a codec, ``"rank <r>"``, ``"largest <ratio>"`` or ``"random <ratio>"``.
        gradients: f32, of any shapes; all zero or none: the error is 0. NaN and infinity: infinity.
    """
    kind, _, number = key.partition(" ")
    lost, whole = 0.0, 0.0
    for gradient in gradients:
        flat = gradient.reshape(-1)
        energy = float(flat.double().square().sum())
        whole += energy
        if kind == "random":
            lost += (1 - float(number)) * energy
        elif kind == "largest":
            lost += energy - float(
                flat.abs()
                .topk(max(1, int(float(number) * flat.numel())))
                .values.double()
                .square()
                .sum()
            )
        elif kind == "rank":
            lost += _lost_by_rank(gradient, int(number))
        else:
            codec = _C.make_codec(key, flat.device.type)
            decoded = codec.decode(codec.encode(flat), 1, flat.dtype, flat.numel())
            lost += float((decoded.reshape(-1).double() - flat.double()).square().sum())
    if whole == 0:
        return 0.0
    return (max(lost / whole, 0.0)) ** 0.5 if math.isfinite(whole) else math.inf


def _lost_by_rank(gradient: torch.Tensor, rank: int) -> float:
    """Energy that two steps of power iteration leave out; nothing of vectors and thin matrices."""
    if gradient.dim() < 2:
        return 0.0
    matrix = gradient.reshape(gradient.shape[0], -1)
    rows, columns = matrix.shape
    if 2 * rank * (rows + columns) > rows * columns:  # sent exactly
        return 0.0
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(columns, rank, generator=generator).to(matrix)
    for _ in range(2):
        basis = torch.linalg.qr(matrix @ query).Q
        query = matrix.T @ basis
    return float(matrix.double().square().sum() - query.double().square().sum())
