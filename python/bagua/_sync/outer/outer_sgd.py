"""The outer optimizer: SGD with momentum, on the mean of what the ranks have learnt."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["OuterSGD"]


@dataclass(frozen=True)
class OuterSGD:
    """Arguments of the outer step of local training.

    With the mean pseudo-gradient ``d``, the momentum ``m`` and the anchor ``a``, in this order,
    each product and sum rounded in float32 (float64 for float64 weights)::

        m = momentum * m + d
        u = d + momentum * m if nesterov else m
        a = a - lr * u

    Args:
        lr: outer learning rate, constant over the training.
        momentum: of the outer step; 0 for none.
        nesterov: look ahead; False is heavy ball.

    Raises:
        ValueError: ``lr`` is not positive, or ``momentum`` is not in [0, 1).
    """

    lr: float = 0.7
    momentum: float = 0.8
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"OuterSGD: lr={self.lr} must be positive")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"OuterSGD: momentum={self.momentum} must be at least 0 and below 1")

    def gain(self, mean_squared: float, momentum_and_mean: float) -> float:
        """Progress of this step along the mean, in units of the mean.

        Args:
            mean_squared: squared norm of the mean, not zero.
            momentum_and_mean: inner product of the momentum before the step with the mean.
        """
        along = self.momentum * momentum_and_mean / mean_squared
        if self.nesterov:
            return self.lr * (1 + self.momentum + self.momentum * along)
        return self.lr * (1 + along)
