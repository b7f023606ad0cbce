"""Rules of adamw_compressors.py whose residuals and momentum belong together, after two papers.

K. Ahn et al., *Dion: Distributed Orthonormalized Updates*, 2025, and Y. Lin et al., *Deep Gradient
Compression*, ICLR 2018. Both compress the ranks' own momentum, and AdamW has none of its own.
"""

from dataclasses import dataclass

import torch
from emulated_compressors import RANKS, Compressor
from emulated_rules import BETA1, DECAY, Adam, clipped


@dataclass
class OwnMomenta:
    """AdamW on exact means for `warm_up` steps, then steps of compressed momenta of the ranks."""

    compressor: Compressor
    warm_up: int = 0

    def __post_init__(self) -> None:
        self.adam = Adam()
        self.momenta: list[torch.Tensor] = []
        self.bytes = 0.0

    def step(self, weights: torch.Tensor, gradients: list[torch.Tensor], lr: float) -> None:
        if self.adam.steps < self.warm_up:
            self.bytes = 4.0 * weights.numel()
            update = self.adam.update(clipped(torch.stack(gradients).mean(0)))
        else:
            update = self.later(self.adam.m.expand_as(weights), gradients)
            self.bytes = self.compressor.bytes
        weights.mul_(1 - lr * DECAY).sub_(update, alpha=lr)

    def later(self, m: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The step for a learning rate of 1. m: the first moment that all ranks share."""
        raise NotImplementedError


class KeptMomenta(OwnMomenta):
    """Dion's error feedback: the momentum decays only where it was sent.

    1. B = M + (1 - beta) G on every rank; 2. C = its compression, and the step is that of the mean
    of all C; 3. M = B - (1 - beta) C, which is beta B where C = B.
    After a warm-up the second moment is frozen. Without one it is that of the gradients that would
    have made the decoded momentum.
    """

    def later(self, m: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        own = self.adam
        self.momenta = self.momenta or [BETA1 * m for _ in gradients]
        owned = [
            momentum.add(clipped(g), alpha=1 - BETA1)
            for momentum, g in zip(self.momenta, gradients, strict=True)
        ]
        mean, sent = self.compressor(owned)
        self.momenta = [b.sub(c, alpha=1 - BETA1) for b, c in zip(owned, sent, strict=True)]
        if not self.warm_up:
            return own.update((mean - BETA1 * m) / (1 - BETA1))
        own.steps, own.m = own.steps + 1, clipped(mean)
        return own.direction(own.m)


@dataclass
class CorrectedMomenta(OwnMomenta):
    """DGC's momentum correction: residuals sum the ranks' own momentum instead of gradients.

    masked: the momentum of an element that was sent starts anew. frozen: the second moment stays as
    the warm-up left it; else it becomes that of what arrives. settled: so does its bias correction.
    """

    masked: bool = True
    frozen: bool = True
    settled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adam = Adam(settled=self.settled)
        self.errors: list[torch.Tensor] = []

    def later(self, m: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        own = self.adam
        self.momenta = self.momenta or [m.clone() for _ in gradients]
        self.errors = self.errors or [torch.zeros_like(m) for _ in gradients]
        for momentum, e, g in zip(self.momenta, self.errors, gradients, strict=True):
            e.add_(momentum.lerp_(clipped(g, RANKS**-0.5), 1 - BETA1))
        mean, sent = self.compressor(self.errors)
        for momentum, e, c in zip(self.momenta, self.errors, sent, strict=True):
            e.sub_(c)
            if self.masked:
                momentum.mul_(c == 0)
        mean, own.steps = clipped(mean), own.steps + 1
        if not self.frozen or not self.warm_up:
            own.see(mean.square())
        return own.direction(mean)
