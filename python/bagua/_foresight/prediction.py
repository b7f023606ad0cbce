"""Predictions of the cost model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Prediction", "Span"]


@dataclass(frozen=True)
class Span:
    """A bucket's time in a step.

    Attributes:
        ready: seconds from the start of the step to its last tensor.
        start: to its first operation.
        end: to its result.
    """

    ready: float
    start: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """Times in seconds, bytes per rank and step; of algorithms with rounds their mean per step.

    Attributes:
        step: of the slowest rank.
        exposed: of the step, in which training is blocked by communication, or slowed down by it.
        bytes_sent: by a rank that sends most, as ``bagua_stats()`` counts them, without agreements.
        busy: in which at least one lane runs a bucket.
        spans: by bucket, in the order of the lanes; of a round's step where there are rounds.
    """

    step: float
    exposed: float
    bytes_sent: int
    busy: float
    spans: tuple[Span, ...] = ()
