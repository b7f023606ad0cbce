"""Splits tensors into buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

__all__ = ["split_by_bucket_size"]

T = TypeVar("T")

#: The first bucket is small, so that the wire has work while backward is still young.
_FIRST_BUCKET_BYTES = 1024**2

#: A bucket below this share of its limit is not worth messages of its own.
_WORTH_CLOSING = 1 / 16


def split_by_bucket_size(
    items: Sequence[T],
    effective: Callable[[T], torch.Tensor],
    bucket_bytes: int | Sequence[int],
    alone: Callable[[T], bool] = lambda _: False,
) -> list[list[T]]:
    """Cut ``items`` into buckets, keeping their order.

    A bucket holds one dtype on one device. It is closed when it has reached ``bucket_bytes`` (the
    first one: 1 MiB), and before a tensor that would make it exceed them, unless it is still tiny;
    so it exceeds them by at most one tensor. A tensor of another dtype opens a bucket of its own
    kind and leaves the others open; an item that is ``alone`` has a bucket for itself.

    ``bucket_bytes`` may be one limit for each bucket; the last holds for all that follow.
    """
    if isinstance(bucket_bytes, int):
        bucket_bytes = (min(bucket_bytes, _FIRST_BUCKET_BYTES), bucket_bytes)
    buckets: list[list[T]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[T], int]] = {}
    for item in items:
        if alone(item):
            buckets.append([item])
            continue
        tensor = effective(item)
        kind = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        members, filled = open_buckets.get(kind, ([], 0))
        limit = bucket_bytes[min(max(len(buckets), 1), len(bucket_bytes)) - 1]
        overflows = filled + size > limit and filled >= limit * _WORTH_CLOSING
        if not members or filled >= limit or overflows:
            members, filled = [], 0
            buckets.append(members)
        members.append(item)
        open_buckets[kind] = (members, filled + size)
    return buckets
