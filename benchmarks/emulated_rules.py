"""Rules of adamw_compressors.py: how ranks with one set of weights turn gradients into a step.

Each rule joins AdamW with a compressor, for all ranks in one process and on flat vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from emulated_compressors import Compressor

BETA1, BETA2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.01  # torch's defaults of AdamW


class Rule(Protocol):
    """Weights change in place; gradients are those of each rank."""

    bytes: float

    def step(self, weights: torch.Tensor, gradients: list[torch.Tensor], lr: float) -> None: ...


def clipped(vector: torch.Tensor, norm: float = 1.0) -> torch.Tensor:
    """As `clip_grad_norm_` clips."""
    return vector * min(1.0, norm / (float(vector.norm()) + 1e-6))


class Adam:
    """Moments of one flat gradient.

    settled: the second moment's bias correction stops with it. Else it goes on while the moment is
    frozen, as in 1-bit Adam and QAdam, and steps grow.
    """

    def __init__(self, beta1: float = BETA1, settled: bool = False) -> None:
        self.beta1, self.steps = beta1, 0
        self.settled, self.squares_seen = settled, 0
        self.m = self.v = torch.zeros(())

    def update(self, gradient: torch.Tensor, squares: torch.Tensor | None = None) -> torch.Tensor:
        """The step for a learning rate of 1; `squares`: for v, instead of the gradient's."""
        self.steps += 1
        squares = gradient.square() if squares is None else squares
        self.m = torch.lerp(self.m.expand_as(gradient), gradient, 1 - self.beta1)
        self.see(squares)
        return self.direction(self.m)

    def see(self, squares: torch.Tensor) -> None:
        self.v = torch.lerp(self.v.expand_as(squares), squares, 1 - BETA2)
        self.squares_seen = self.steps

    def direction(self, momentum: torch.Tensor) -> torch.Tensor:
        steps = self.squares_seen if self.settled else self.steps
        root = (self.v / (1 - BETA2**steps)).sqrt_().add_(EPS)
        return momentum / (1 - self.beta1**self.steps) / root


@dataclass
class Residuals:
    """Error feedback around a compressor."""

    compressor: Compressor
    kept: float = 1.0  # of a residual, from step to step
    errors: list[torch.Tensor] = field(default_factory=list, init=False)
    sent: list[torch.Tensor] = field(default_factory=list, init=False)  # by the last call

    def mean(self, brought: Sequence[torch.Tensor]) -> torch.Tensor:
        if not self.errors:
            self.errors = [torch.zeros_like(vector) for vector in brought]
        owned = [v.add(e, alpha=self.kept) for v, e in zip(brought, self.errors, strict=True)]
        mean, self.sent = self.compressor(owned)
        self.errors = [o - s for o, s in zip(owned, self.sent, strict=True)]
        return mean


@dataclass
class Gradients:
    """Gradients are compressed, and AdamW sees the decoded mean.

    release: the part of what has arrived that AdamW sees per step; the rest waits, on all ranks
    alike. 1: all of it at once.
    squares: of which the second moment is made: "decoded", what AdamW sees; "local", the exact mean
    of the ranks' own; "factored", their exact row and column sums (Adafactor); "frozen", only those
    of the warm-up. settled: and their bias correction.
    """

    residuals: Residuals
    warm_up: int = 0
    release: float = 1.0
    squares: str = "decoded"
    settled: bool = False

    def __post_init__(self) -> None:
        self.adam, self.waiting = Adam(settled=self.settled), torch.zeros(())
        self.bytes = 0.0

    def step(self, weights: torch.Tensor, gradients: list[torch.Tensor], lr: float) -> None:
        self.bytes = 4.0 * weights.numel()
        mean = torch.stack(gradients).mean(0)
        if self.adam.steps >= self.warm_up:
            mean = self.residuals.mean(gradients)
            self.bytes = self.residuals.compressor.bytes
            self.waiting = self.waiting + mean
            mean = self.waiting * self.release
            self.waiting = self.waiting - mean
        update = self._update(clipped(mean), gradients)
        weights.mul_(1 - lr * DECAY).sub_(update, alpha=lr)

    def _update(self, mean: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        own = self.adam
        if self.squares != "frozen" or own.steps < self.warm_up:
            return own.update(mean, self._squares(gradients))
        own.steps, own.m = own.steps + 1, torch.lerp(own.m, mean, 1 - own.beta1)
        return own.direction(own.m)

    def _squares(self, gradients: list[torch.Tensor]) -> torch.Tensor | None:
        if self.squares == "decoded" or self.adam.steps < self.warm_up:
            return None
        mean = torch.stack([clipped(g).square_() for g in gradients]).mean(0)
        for part in self.residuals.compressor.parts if self.squares == "factored" else []:
            if len(part.shape) == 2:
                matrix = mean[part.place].view(part.shape)
                rows, columns = matrix.mean(1, keepdim=True), matrix.mean(0, keepdim=True)
                matrix.copy_(rows * columns / rows.mean().clamp_min(1e-30))
                self.bytes += 4.0 * sum(part.shape)
        return mean


@dataclass
class Momenta:
    """Momentum is compressed after a warm-up, as in 1-bit Adam.

    refresh: steps from one exact mean of the ranks' second moments to the next, 0: frozen.
    settled: so is the bias correction.
    """

    residuals: Residuals
    warm_up: int
    refresh: int = 0
    beta1: float = BETA1
    settled: bool = False

    def __post_init__(self) -> None:
        self.adam = Adam(self.beta1, self.settled)
        self.local: list[torch.Tensor] = []
        self.bytes = 0.0

    def step(self, weights: torch.Tensor, gradients: list[torch.Tensor], lr: float) -> None:
        own, self.bytes = self.adam, 4.0 * weights.numel()
        if own.steps < self.warm_up:
            update = own.update(clipped(torch.stack(gradients).mean(0)))
            self.local = [own.v.clone() for _ in gradients]
        else:
            own.steps += 1
            momenta = [torch.lerp(own.m, g, 1 - own.beta1) for g in gradients]
            own.m = clipped(self.residuals.mean(momenta))
            self.bytes = self.residuals.compressor.bytes
            if self.refresh:
                for local, gradient in zip(self.local, gradients, strict=True):
                    local.lerp_(clipped(gradient).square_(), 1 - BETA2)
                self.bytes += 4.0 * weights.numel() / self.refresh
                if own.steps % self.refresh == 0:
                    own.v = torch.stack(self.local).mean(0)
                    self.local = [own.v.clone() for _ in gradients]
            update = own.direction(own.m)
        weights.mul_(1 - lr * DECAY).sub_(update, alpha=lr)


@dataclass
class Updates:
    """Every rank steps with an AdamW of its own, and the ranks compress what it would change.

    share: steps between exact means of the second moments, 0: never. masked: the momentum of an
    element that was sent starts anew (DGC's momentum factor masking).
    """

    residuals: Residuals
    warm_up: int = 0
    share: int = 0
    masked: bool = False
    factor: float = 1.0  # of what arrives

    def __post_init__(self) -> None:
        self.adams: list[Adam] = []
        self.bytes = 0.0

    def step(self, weights: torch.Tensor, gradients: list[torch.Tensor], lr: float) -> None:
        self.adams = self.adams or [Adam() for _ in gradients]
        warming_up = self.adams[0].steps < self.warm_up
        if warming_up:  # exact gradients
            gradients = [torch.stack(gradients).mean(0)] * len(gradients)
        pairs = list(zip(self.adams, gradients, strict=True))
        updates = [adam.update(clipped(gradient)).mul_(lr) for adam, gradient in pairs]
        self.bytes = 4.0 * weights.numel()
        if warming_up:
            mean = torch.stack(updates).mean(0)
        else:
            mean = self.residuals.mean(updates)
            self.bytes = self.residuals.compressor.bytes
            if self.masked:
                for adam, sent in zip(self.adams, self.residuals.sent, strict=True):
                    adam.m = torch.where(sent == 0, adam.m, 0.0)
            if self.share:
                self.bytes += 4.0 * weights.numel() / self.share
                if self.adams[0].steps % self.share == 0:
                    shared = torch.stack([adam.v for adam in self.adams]).mean(0)
                    for adam in self.adams:
                        adam.v = shared.clone()
        weights.mul_(1 - lr * DECAY).sub_(mean, alpha=self.factor)


@dataclass
class Differences:
    """Ranks compress what their momentum differs by from what they have sent (EF21-SGDM).

    A rank's h is the sum of what it has sent; AdamW sees the mean of all h, smooth and dense.
    beta: of the momentum. beta1: of AdamW.
    """

    compressor: Compressor
    warm_up: int = 0
    beta: float = BETA1
    beta1: float = BETA1

    def __post_init__(self) -> None:
        self.adam = Adam(self.beta1)
        self.momenta: list[torch.Tensor] = []
        self.states: list[torch.Tensor] = []
        self.bytes = 0.0

    def step(self, weights: torch.Tensor, gradients: list[torch.Tensor], lr: float) -> None:
        self.bytes = 4.0 * weights.numel()
        mean = torch.stack(gradients).mean(0)
        if not self.momenta:
            self.momenta = [g.clone() for g in gradients]
        for momentum, gradient in zip(self.momenta, gradients, strict=True):
            momentum.lerp_(gradient, 1 - self.beta)
        if self.adam.steps >= self.warm_up:
            if not self.states:  # the exact mean of the last step, in place of every rank's own
                start = torch.stack(self.momenta).mean(0) if self.warm_up else mean * 0
                self.states = [start.clone() for _ in gradients]
            pairs = list(zip(self.momenta, self.states, strict=True))
            _, sent = self.compressor([m - h for m, h in pairs])
            self.states = [h + s for h, s in zip(self.states, sent, strict=True)]
            mean = torch.stack(self.states).mean(0)
            self.bytes = self.compressor.bytes
        update = self.adam.update(clipped(mean))
        weights.mul_(1 - lr * DECAY).sub_(update, alpha=lr)
