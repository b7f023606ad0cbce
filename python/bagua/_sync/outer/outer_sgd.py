"""The outer optimizer: SGD with momentum, on the mean of what the ranks have learnt."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["GrowingMomentum", "OuterSGD"]


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

    def step_after(self, momentum: float, correlation: float | None) -> OuterSGD:
        """The next step's rates: its own, whatever the rounds before were."""
        return self

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


class GrowingMomentum:
    """The default: an :class:`OuterSGD` that begins as local SGD and gains momentum.

    With the mean pseudo-gradient ``d`` of a fragment, the momentum buffer ``m`` before the step,
    and ``mu``, which is 0 in the first round::

        mu = min(max(mu + 0.2 * (cos(d, m) - 0.2), 0), 0.8)
        lr = 1 - 0.375 * mu

    and then a step of ``OuterSGD(lr, mu)``. Where rounds keep a direction it arrives at (0.7, 0.8)
    in a dozen rounds or more; where they do not, as in few or noisy rounds, it stays local SGD.
    """

    _RATE, _FROM, _MOST, _LESS = 0.2, 0.2, 0.8, 0.375
    _PARTS = 256  # of the cosine: sums of another order, as of another device, give equal rates

    def step_after(self, momentum: float, correlation: float | None) -> OuterSGD:
        """The next step's rates.

        Args:
            momentum: of the fragment's step before; 0 in the first round.
            correlation: cosine of ``d`` and ``m``; None: one of them is zero.
        """
        if correlation is not None:
            rounded = round(correlation * self._PARTS) / self._PARTS
            momentum = min(max(momentum + self._RATE * (rounded - self._FROM), 0.0), self._MOST)
        return OuterSGD(1 - self._LESS * momentum, momentum)

    def __repr__(self) -> str:
        return "GrowingMomentum()"
