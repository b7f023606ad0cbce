"""Speeds of copies, codecs and the other arithmetic of operations, on one device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bagua import _C
from bagua._foresight.profile import CodecSpeed

__all__ = ["codec_speed", "copy_speed", "low_rank_speed", "seconds_of", "top_k_speed", "wait_for"]

_SECONDS = 0.06  # for which a call is repeated, at least so many times
_CALLS = 3
_ROUNDS = 7  # of calls that send
_SENT = 0.01  # share of the elements that a sparse message has


def wait_for(device: torch.device) -> None:
    """Block until the device has nothing left to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(function: Callable[[], object], device: torch.device | str = "cpu") -> float:
    """Seconds of a call after a first one, the mean over some time.

    The mean, since ranks that outnumber the cores take turns that last longer than a call: each
    call alone would be fast.
    """
    device = torch.device(device)

    def call() -> None:
        function()
        wait_for(device)

    call()
    begun, passed, calls = time.perf_counter(), 0.0, 0
    while passed < _SECONDS or calls < _CALLS:
        call()
        calls += 1
        passed = time.perf_counter() - begun
    return max(1e-9, passed / calls)


def copy_speed(device: torch.device | str = "cpu", numel: int = 1 << 24) -> float:
    """Bytes a second that are copied, of ``numel`` elements of float32: more than caches hold."""
    source = torch.randn(numel, device=device)
    target = torch.empty_like(source)
    return 4 * numel / seconds_of(lambda: target.copy_(source), device)


def codec_speed(name: str, numel: int, device: torch.device | str = "cpu") -> CodecSpeed:
    """Speeds of the codec on ``numel`` normal float32 values in one chunk."""
    codec = _C.make_codec(name, torch.device(device).type)
    x = torch.randn(numel, device=device)
    payload, out = codec.encode(x), torch.zeros_like(x)
    return CodecSpeed(
        4 * numel / seconds_of(lambda: codec.encode_into(x, 1, payload), device),
        4 * numel / seconds_of(lambda: codec.decode_into(payload, 1, out), device),
        4 * numel / seconds_of(lambda: codec.decode_add(payload, x.dtype, out), device),
    )


def top_k_speed(numel: int) -> float:
    """Bytes of float32 a second from which the largest elements are selected, on the CPU."""
    x = torch.randn(numel)
    return 4 * numel / seconds_of(lambda: _C.top_k(x, max(1, round(_SENT * numel))))


def low_rank_speed(communicator: _C.Communicator, rows: int, columns: int) -> float:
    """Bytes of float32 a second of PowerSGD of rank 1, on a matrix, on the CPU.

    All ranks of ``communicator`` call it; one alone makes no products, and gets no figure: 0.
    """
    if communicator.size == 1:
        return 0.0
    numel = rows * columns
    memory = _C.RoundMemory(
        [torch.zeros(numel), torch.zeros(columns), torch.zeros(1, dtype=torch.int64)],
        _C.RoundOutcome(),
    )
    matrix = (0, rows, columns, 1)
    op = _C.LowRank(
        communicator,
        _C.Scratch(),
        numel,
        [matrix],
        warm_start=True,
        error_feedback=True,
        seed=0,
        memory=memory,
    )
    flat = torch.randn(numel)
    left, right = torch.zeros(rows), torch.zeros(columns)

    def sums() -> None:
        communicator.all_reduce(left, _C.ReduceOp.SUM)
        communicator.all_reduce(right, _C.ReduceOp.SUM)

    messages = _seconds_together(sums)
    whole = _seconds_together(lambda: op.run(flat, 1, 1.0, "probe"))
    return 4 * numel / max(whole - messages, 0.2 * whole)


def _seconds_together(function: Callable[[], object]) -> float:
    """As :func:`seconds_of` of what all ranks call equally often."""
    function()
    begun = time.perf_counter()
    for _ in range(_ROUNDS):
        function()
    return max(1e-9, (time.perf_counter() - begun) / _ROUNDS)
