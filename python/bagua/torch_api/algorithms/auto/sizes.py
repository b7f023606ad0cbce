"""Smaller buckets, which may be faster than those of the default size."""

from __future__ import annotations

from dataclasses import replace

from bagua._foresight.candidate import Candidate
from bagua._foresight.model.plan import buckets_of
from bagua._foresight.profile import Profile
from bagua.torch_api.algorithms.auto.choice import Row

__all__ = ["other_size"]

#: Parts into which the gradients are cut. Of fewer, the last one takes long behind backward; each
#: further message costs some tenths of a millisecond.
_PARTS = 8
_LEAST_BYTES = 64 * 1024
#: Share of a step that better hidden communication has to save at best.
_WORTH_TRYING = 0.1


def other_size(profile: Profile, row: Row) -> Candidate | None:
    """``row``'s candidate with smaller buckets, where a trial of them may be worth it, or None.

    A trial decides, not the model: when gradients are ready inside of a bucket, and what each
    further message costs on a busy machine, are not known well enough.

    None where the user named a size, where communication is hidden already or fills the step, or
    where no tensor goes to another bucket.
    """
    if row.candidate.bucket_bytes is not None or row.seconds == float("inf"):
        return None
    at_best = max(profile.compute, row.busy)
    if row.seconds - at_best < _WORTH_TRYING * row.seconds:
        return None
    size = max(_LEAST_BYTES, -(-profile.bytes // _PARTS))
    if _cut(profile, size) == _cut(profile, None):
        return None
    return replace(row.candidate, bucket_bytes=size)


def _cut(profile: Profile, size: int | None) -> tuple[int, ...]:
    return tuple(bucket.bytes for bucket in buckets_of(profile, size))
