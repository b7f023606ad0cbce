"""Outer optimizers: any of ``torch.optim``; the default is SGD with a momentum that grows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from bagua import _C

#: Makes an optimizer of the anchors (f32 or f64, of the parameters' shapes) of a fragment. Its
#: ``step()`` takes the mean pseudo-gradients as ``.grad``.
OuterOptimizer: TypeAlias = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

#: The sum of the products of two lists of tensors.
InnerProduct: TypeAlias = Callable[[list[torch.Tensor], list[torch.Tensor]], float]

#: Figures of a step that only :class:`OuterSGD` has.
NO_FIGURES: dict[str, float | None] = {"correlation": None, "gain": None}


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

    Example::

        local_sgd = DiLoCoAlgorithm(OuterSGD(lr=1.0, momentum=0.0), interval=20)
    """

    lr: float = 0.7
    momentum: float = 0.8
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"OuterSGD: lr={self.lr} must be positive")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"OuterSGD: momentum={self.momentum} must be at least 0 and below 1")

    def __call__(self, anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
        return _Momentum(anchors, self)

    def step_after(self, momentum: float, correlation: float | None) -> OuterSGD:
        """The next step's rates: its own, whatever the rounds before were."""
        return self

    def gain(self, mean_squared: float, momentum_and_mean: float) -> float:
        """Progress of this step along the mean, in units of the mean.

        From its squared norm, not zero, and its inner product with the momentum before the step.
        """
        along = self.momentum * momentum_and_mean / mean_squared
        if self.nesterov:
            return self.lr * (1 + self.momentum + self.momentum * along)
        return self.lr * (1 + along)


@dataclass(frozen=True)
class GrowingMomentum:
    """The default: an :class:`OuterSGD` that begins as local SGD and gains momentum.

    With the mean pseudo-gradient ``d`` of a fragment, the momentum buffer ``m`` before the step,
    and ``mu``, which is 0 in the first round::

        mu = min(max(mu + 0.2 * (cos(d, m) - 0.2), 0), 0.8)
        lr = 1 - 0.375 * mu

    and then a step of ``OuterSGD(lr, mu)``. Where rounds keep a direction it arrives at (0.7, 0.8)
    in a dozen rounds or more; where they do not, as in few or noisy rounds, it stays local SGD.
    """

    def __call__(self, anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
        return _Momentum(anchors, self)

    def step_after(self, momentum: float, correlation: float | None) -> OuterSGD:
        """The rates after a step with ``momentum``, 0 in the first round.

        ``correlation``: cosine of ``d`` and ``m``; None: one of them is zero.
        """
        if correlation is not None:
            # Sums of another order, as of another device, give equal rates.
            rounded = round(correlation * 256) / 256
            momentum = min(max(momentum + 0.2 * (rounded - 0.2), 0.0), 0.8)
        return OuterSGD(1 - 0.375 * momentum, momentum)


class _Momentum(torch.optim.Optimizer):
    """Steps of :class:`OuterSGD`, with equal bits on every processor.

    The state of an anchor is its ``momentum``, and the ``rate`` of that in the last step, one f64
    for all. The group has the figures of the last step.
    """

    def __init__(self, anchors: list[torch.Tensor], rule: OuterSGD | GrowingMomentum) -> None:
        rates = rule.step_after(0.0, None)
        super().__init__(anchors, {"lr": rates.lr, "momentum": rates.momentum, **NO_FIGURES})
        self.inner_product: InnerProduct = _C.inner_product
        self._rule = rule
        self._anchors = anchors
        rate = torch.zeros((), dtype=torch.float64, device=anchors[0].device)
        for anchor in anchors:
            self.state[anchor] = {"momentum": torch.zeros_like(anchor), "rate": rate}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        anchors = self._anchors
        means = [anchor.grad for anchor in anchors if anchor.grad is not None]
        momenta = [self.state[anchor]["momentum"] for anchor in anchors]
        rate = self.state[anchors[0]]["rate"]
        squared, along = self.inner_product(means, means), self.inner_product(momenta, means)
        lengths = math.sqrt(squared * self.inner_product(momenta, momenta))
        correlation = along / lengths if 0 < lengths < math.inf else None
        step = self._rule.step_after(rate.item(), correlation)
        for anchor in anchors:
            self.state[anchor]["rate"].fill_(step.momentum)
        _C.outer_step(anchors, momenta, means, lr=step.lr, mu=step.momentum, nesterov=step.nesterov)
        gain = step.gain(squared, along) if squared > 0 else None
        self.param_groups[0].update(
            lr=step.lr, momentum=step.momentum, correlation=correlation, gain=gain
        )


def made(
    factory: OuterOptimizer, anchors: list[torch.Tensor], inner_product: InnerProduct
) -> torch.optim.Optimizer:
    """The optimizer of ``anchors``, whose :data:`InnerProduct` may be over more than they."""
    optimizer = factory(anchors)
    if isinstance(optimizer, _Momentum):
        optimizer.inner_product = inner_product
    return optimizer


def figures(optimizer: torch.optim.Optimizer) -> dict[str, float | None]:
    """``lr`` and ``momentum`` of the last step; ``correlation`` and ``gain`` of an OuterSGD."""
    group = optimizer.param_groups[0]
    return {key: group.get(key) for key in ("lr", "momentum", *NO_FIGURES)}


def describe(factory: OuterOptimizer, owner: str) -> str:
    """One line of the optimizer that ``factory`` makes, equal on all ranks where it is the same.

    Tries it on an anchor of one element. TypeError, for ``owner``, where it cannot be used.
    """
    if not callable(factory) or isinstance(factory, torch.optim.Optimizer):
        raise TypeError(
            f"{owner}: outer_optimizer is an OuterSGD, such as OuterSGD(lr=0.7), or a function "
            "that makes an optimizer of the anchors, such as lambda params: "
            f"torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True), not {factory!r}"
        )
    if isinstance(factory, (OuterSGD, GrowingMomentum)):
        return repr(factory)
    anchor = torch.zeros(1, 1)
    optimizer = factory([anchor])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{owner}: outer_optimizer made {optimizer!r}, no torch.optim.Optimizer")
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{owner}: {name}.step() needs a closure that computes the loss, which an outer step "
            "does not have: take an optimizer that steps on gradients, such as torch.optim.SGD"
        )
    anchor.grad = torch.zeros_like(anchor)
    optimizer.step()
    _refuse_other_state(optimizer, f"{owner}: {name}")
    return f"{name} {optimizer.defaults}"


def _refuse_other_state(optimizer: torch.optim.Optimizer, owner: str) -> None:
    """Raise TypeError for state that is neither tensor nor None: it could not be saved by name."""
    for anchor, state in optimizer.state.items():
        if not isinstance(anchor, torch.Tensor):
            raise TypeError(
                f"{owner} keeps state['{anchor}'], which is of no parameter and could not be "
                f"saved: {_REMEDY}"
            )
        for key, value in state.items() if isinstance(state, dict) else [("state", state)]:
            if not isinstance(value, (torch.Tensor, type(None))) or value is state:
                raise TypeError(
                    f"{owner} keeps '{key}' as a {type(value).__name__}, no tensor: {_REMEDY}"
                )


_REMEDY = (
    "take an outer optimizer whose state is tensors in dicts by parameter, or keep the value in "
    "its param_groups"
)


def state_of(optimizer: torch.optim.Optimizer, anchor: torch.Tensor) -> dict[str, Any]:
    state = optimizer.state.get(anchor, {})
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
