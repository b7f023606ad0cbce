"""Speed of codecs on this device, and their error on real gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from bagua import _C
from bagua._foresight.profile import CodecSpeed

__all__ = ["error_of", "measure_copy", "measure_speed"]

_REPEATS = 3
_COPIED_BYTES = 8 * 1024**2


def measure_speed(name: str, numel: int, device: torch.device) -> CodecSpeed:
    """Speed of a codec on one chunk of ``numel`` elements of f32."""
    codec = _C.make_codec(name, device.type)
    x = torch.randn(numel, device=device)
    payload, out = codec.encode(x), torch.zeros_like(x)
    size = 4 * numel
    return CodecSpeed(
        size / _fastest(lambda: codec.encode_into(x, 1, payload), device),
        size / _fastest(lambda: codec.decode_into(payload, 1, out), device),
        size / _fastest(lambda: codec.decode_add(payload, x.dtype, out), device),
    )


def measure_copy(device: torch.device) -> float:
    """Bytes a second that the device copies, or one core of the processor."""
    x = torch.zeros(_COPIED_BYTES // 4, device=device)
    y = torch.empty_like(x)
    return _COPIED_BYTES / _fastest(lambda: y.copy_(x), device)


def _fastest(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call: the fastest of a few, as whatever disturbs one makes it slower."""
    seconds = []
    for _ in range(1 + _REPEATS):
        begun = time.perf_counter()
        function()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return max(min(seconds[1:]), 1e-9)


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
