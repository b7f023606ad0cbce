"""Bytes that a rank sends, as ``bagua_stats()`` counts them.

Sizes of payloads are the core's own; how a part is cut into messages is that of
``csrc/op/wire/part_layout.h`` on the CPU. docs/wire-format.md describes both.
"""

from __future__ import annotations

import functools
import math

import torch

from bagua import _C
from bagua._core.compression.sparse_choice import number_sent

__all__ = [
    "all_reduce_bytes",
    "broadcast_children",
    "chunked_sparse_bytes",
    "low_rank_numbers",
    "padded",
    "part_bytes",
    "segments",
    "sparse_bytes",
]

_FRAME_BYTES = 32
_TILE_NUMEL = 131072
_SEGMENT_TILES = 8
_ALIGNMENT = 16  # elements per rank to which compressed buckets are padded


def padded(numel: int, ranks: int) -> int:
    """Elements of a bucket whose parts, one for each rank, are equal and aligned."""
    unit = _ALIGNMENT * ranks
    return (numel + unit - 1) // unit * unit


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Sent by a rank in a ring all-reduce of ``size`` bytes."""
    return 2 * size * (ranks - 1) // ranks


def broadcast_children(ranks: int) -> int:
    """Messages of the root of a broadcast along a binomial tree."""
    return max(0, ranks - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def part_bytes(codec: str, numel: int) -> int:
    """A part of ``numel`` float32 elements, encoded, with the frames of its segments."""
    made = _C.make_codec(codec)
    if numel == 0:
        return 0
    if made.block_numel == 0:
        return _FRAME_BYTES + made.payload_bytes(torch.float32, numel)
    whole, tail = divmod(numel, _TILE_NUMEL)
    payload = whole * made.payload_bytes(torch.float32, _TILE_NUMEL)
    if tail:
        payload += made.payload_bytes(torch.float32, tail)
    return payload + _FRAME_BYTES * segments(codec, numel)


def segments(codec: str, numel: int) -> int:
    """Messages in which a part of ``numel`` elements travels."""
    if numel == 0:
        return 0
    if _C.make_codec(codec).block_numel == 0:
        return 1
    tiles = math.ceil(numel / _TILE_NUMEL)
    return math.ceil(tiles / _SEGMENT_TILES)


@functools.lru_cache(maxsize=4096)
def sparse_bytes(numel: int, ratio: float, codec: str | None) -> int:
    """A message of the largest elements of a bucket."""
    values = None if codec is None else _C.make_codec(codec)
    return _C.sparse_message_bytes(numel, number_sent(numel, ratio), torch.float32, values)


def low_rank_numbers(
    shapes: tuple[tuple[int, int], ...], numel: int, rank: int, min_compression_rate: float
) -> tuple[int, int]:
    """Elements of the two all-reduces of PowerSGD: left factors with the rest, right factors."""
    left = right = factored = 0
    for rows, columns in shapes:
        columns_sent = min(rank, rows, columns)
        small = columns_sent * (rows + columns)
        if columns == 1 or rows == 1 or rows * columns <= min_compression_rate * small:
            continue
        left += rows * columns_sent
        right += columns * columns_sent
        factored += rows * columns
    return left + max(0, numel - factored), right


@functools.lru_cache(maxsize=4096)
def chunked_sparse_bytes(numel: int, ratio: float) -> int:
    """A message of the largest elements of each chunk, in two bits (SparseLoCo)."""
    k = max(1, round(ratio * _C.SPARSE_CHUNK_NUMEL))
    return _C.chunked_message_bytes(numel, k)
