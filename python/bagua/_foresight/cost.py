"""Predicts what a step costs with a candidate."""

from __future__ import annotations

from bagua._foresight.candidate import Candidate
from bagua._foresight.prediction import Prediction, Span
from bagua._foresight.profile import Link, Profile

__all__ = ["predict"]


def predict(
    profile: Profile,
    candidate: Candidate,
    *,
    ranks: int | None = None,
    between: Link | None = None,
    inside: Link | None = None,
) -> Prediction:
    """The cost of a step with a candidate, in milliseconds of a core.

    Args:
        profile: of a training.
        candidate: an algorithm and its arguments.
        ranks: predict for so many; nodes are as large as the profile's largest. None: the
            profile's.
        between: another link between nodes than the profile's.
        inside: another link inside nodes than the profile's.

    Raises:
        ValueError: an algorithm that the model does not know, or arguments that it does not take.
    """
    ranks = profile.ranks if ranks is None else ranks
    between = profile.between if between is None else between
    end, spans, total = 0.0, [], 0
    for bucket in profile.buckets:
        sent = 2 * bucket.bytes * (ranks - 1) // ranks
        start = max(end, bucket.ready)
        end = start + sent / between.bandwidth + 2 * (ranks - 1) * between.latency
        spans.append(Span(bucket.ready, start, end))
        total += sent
    backward = profile.compute - profile.optimizer
    step = max(end, backward) + profile.optimizer
    busy = sum(span.end - span.start for span in spans)
    return Prediction(step, step - profile.compute, total, busy, tuple(spans))
