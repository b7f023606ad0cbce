"""Means of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["average_by_removing_extreme_values"]

_ROUNDS_OF_WEEDING = 11


def average_by_removing_extreme_values(
    raw_score_list: Sequence[float],
) -> tuple[float, float, list[float]]:
    """Mean, standard deviation and list of the measurements that are left without outliers.

    1. The first third is dropped, as a warm-up.
    2. Values a standard deviation or more from the mean are dropped, if others are left.
    3. That is repeated while the standard deviation is not below the mean, at most ten times.

    Raises:
        ValueError: there is no measurement.
    """
    scores = [float(score) for score in raw_score_list[len(raw_score_list) // 3 :]]
    if not scores:
        raise ValueError("average_by_removing_extreme_values needs at least one measurement")
    for _ in range(_ROUNDS_OF_WEEDING):
        mean, deviation = statistics.fmean(scores), statistics.pstdev(scores)
        scores = [score for score in scores if abs(score - mean) < deviation] or scores
        if statistics.pstdev(scores) < statistics.fmean(scores):
            break
    return statistics.fmean(scores), statistics.pstdev(scores), scores
