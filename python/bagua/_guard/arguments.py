"""``Guard``: what is measured, how often, and from which figure on something is done."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Guard"]


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Measures what a lossy algorithm loses during training, and has buckets lose less.

    Every ``every`` rounds, and ten times as often in the first half of them, some elements of some
    buckets are averaged exactly as well: one all-reduce of ``buckets * (elements + 2)`` float64,
    and one of three numbers per bucket. A figure above its threshold is measured again in the next
    round, on other elements. If it is above it again, that is a breach: the bucket is averaged
    exactly for ``exact_rounds`` rounds, on all ranks from the same round on, and rank 0 warns once,
    with the bucket, the figure, the threshold, what is done and a remedy. Then the algorithm tries
    again. Each further breach of the bucket doubles the rounds, the one of number ``attempts``
    makes it exact for good. Residuals of error feedback are sent with the first exact round.
    Figures that are not finite, as those of a round with an overflow, count as not measured.

    Where a codec has fewer than 8 bits, and 8 bits would lose little enough of the sample, the
    first breach is answered with ``block_uint8`` for ``exact_rounds`` rounds instead, and does not
    count as one of the attempts. Residuals go on as they are. A breach in these rounds, or after
    them, is answered as above. For ``bytegrad`` and ``qadam``.

    Args:
        every: rounds from one check to the next.
        buckets: that one check looks at; all have their turn.
        elements: that are compared in each of them, drawn anew each time.
        relative_error: threshold of the error of the communicated mean over the exact mean, for
            operations without error feedback: norms over 16 neighbouring elements, and the median
            over such runs, so that large gradients of one layer do not hide small ones of another.
            An adaptive optimizer makes steps of one size of both. Measured on real gradients, block
            codecs of 8 bits have 0.01 to 0.05 and those of 4 bits 0.1 to 0.2, which train as exact
            gradients do; those of 2 bits have 0.35 to 0.55 and of 1 bit 0.6 to 0.9, which do not.
        residual: threshold of the norm of the residuals over that of the gradients, for operations
            with error feedback. A ratio of r says that an element waits for some r rounds until it
            is sent. Adam divides what comes late and at once by the magnitude of what came before;
            beyond 3 rounds that is another direction. Measured, but not judged, where no optimizer
            scales elements (none has ``betas`` or ``eps``): with SGD error feedback converges as
            exact gradients do (Karimireddy et al., ICML 2019), and where a model has fitted its
            data residuals are large beside gradients that vanish.
        consensus: threshold of the ranks' distance from the mean of their weights (root of the mean
            square) over the norm of that mean, for algorithms whose ranks have weights of their
            own. From a tenth on gradients are of different points.
        nonfinite: threshold of the share of rounds whose result held NaN or infinity, since the
            last check. A ``GradScaler`` that looks for its scale has some; above a half training
            stands still. Warns only: exact averages would not be finite either. Not counted on
            CUDA.
        exact_rounds: rounds for which a bucket is exact, or in 8 bits, after its first breach.
        attempts: breaches of a bucket, answered with exact rounds, after which it stays exact.

    A threshold of ``math.inf`` switches its figure off.

    Raises:
        ValueError: a number below 1, or a threshold that is not positive.
    """

    every: int = 50
    buckets: int = 4
    elements: int = 512
    relative_error: float = 0.3
    residual: float = 3.0
    consensus: float = 0.1
    nonfinite: float = 0.5
    exact_rounds: int = 200
    attempts: int = 2

    def __post_init__(self) -> None:
        for name in ("every", "buckets", "elements", "exact_rounds", "attempts"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"Guard: {name}={number!r} must be a whole number from 1 on")
        for name in ("relative_error", "residual", "consensus", "nonfinite"):
            threshold = getattr(self, name)
            if math.isnan(threshold) or threshold <= 0:
                raise ValueError(
                    f"Guard: {name}={threshold!r} must be above 0; math.inf switches it off"
                )
