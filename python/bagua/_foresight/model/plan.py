"""The buckets of a candidate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua._foresight.profile import BucketProfile, Profile
from bagua._sync.bucketing import split_by_bucket_size

__all__ = ["buckets_of", "share_of"]


def buckets_of(profile: Profile, bucket_bytes: int | None) -> tuple[BucketProfile, ...]:
    """Those of the profile, or its tensors in buckets of another size.

    A tensor counts as ready at the time that its bytes have in the bucket of the profile, which is
    filled evenly between the readiness of the one before and its own. The tensors of a bucket
    without shapes stay together.
    """
    if bucket_bytes is None:
        return profile.buckets
    tensors: list[BucketProfile] = []
    before = 0.0
    for bucket in profile.buckets:
        tensors += _tensors_of(bucket, min(before, bucket.ready))
        before = max(before, bucket.ready)
    width = max(1, profile.bytes // profile.numel)
    dtype = {2: torch.float16, 8: torch.float64}.get(width, torch.float32)
    groups = split_by_bucket_size(
        tensors, lambda tensor: torch.empty(tensor.numel, dtype=dtype, device="meta"), bucket_bytes
    )
    return tuple(_joined(group) for group in groups)


def share_of(bucket: BucketProfile, parts: int) -> BucketProfile:
    """One of so many equal parts of a bucket."""
    if parts == 1:
        return bucket
    return BucketProfile(max(1, bucket.numel // parts), max(1, bucket.bytes // parts), bucket.ready)


def _tensors_of(bucket: BucketProfile, before: float) -> list[BucketProfile]:
    if len(bucket.shapes) < 2:
        return [bucket]
    width, filled, result = bucket.bytes // bucket.numel, 0, []
    for rows, columns in bucket.shapes:
        numel = rows * columns
        filled += numel
        share = min(1.0, filled / bucket.numel)
        ready = before + (bucket.ready - before) * share
        result.append(BucketProfile(numel, numel * width, ready, ((rows, columns),)))
    return result


def _joined(tensors: Sequence[BucketProfile]) -> BucketProfile:
    return BucketProfile(
        sum(tensor.numel for tensor in tensors),
        sum(tensor.bytes for tensor in tensors),
        max(tensor.ready for tensor in tensors),
        tuple(shape for tensor in tensors for shape in tensor.shapes),
    )
