"""Which tensors share a bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

__all__ = ["split_by_bucket_size"]

T = TypeVar("T")


def split_by_bucket_size(
    items: Sequence[T], effective: Callable[[T], torch.Tensor], bucket_bytes: int
) -> list[list[T]]:
    """Cut ``items`` into buckets, keeping their order.

    A bucket holds one dtype on one device and is closed when it has reached ``bucket_bytes``, so
    it exceeds them by at most one tensor. A tensor of another dtype opens a bucket of its own
    kind and leaves the others open.
    """
    buckets: list[list[T]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[T], int]] = {}
    for item in items:
        tensor = effective(item)
        kind = (tensor.dtype, tensor.device)
        members, size = open_buckets.get(kind, ([], 0))
        if not members:
            buckets.append(members)
        members.append(item)
        size += tensor.numel() * tensor.element_size()
        open_buckets[kind] = ([], 0) if size >= bucket_bytes else (members, size)
    return buckets
