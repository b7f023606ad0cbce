"""Rules of adamw_compressors.py whose residuals and momentum belong together, after two papers.

K. Ahn et al., *Dion: Distributed Orthonormalized Updates*, 2025, and Y. Lin et al., *Deep Gradient
Compression*, ICLR 2018. Both compress the ranks' own momentum, and AdamW has none of its own.
"""

from dataclasses import dataclass

import torch
from emulated_compressors import RANKS, Compressor
from emulated_rules import BETA1, DECAY, Adam, clipped


@dataclass
class KeptMomenta:
    """Dion's error feedback: the momentum decays only where it was sent.

    1. B = M + (1 - beta) G on every rank; 2. C = its compression, and the step is that of the mean
    of all C; 3. M = B - (1 - beta) C, which is beta B where C = B.
    After a warm-up the second moment is frozen. Without one it is that of the gradients that would
    have made the decoded momentum.
    """

    compressor: Compressor
    warm_up: int = 0

    def __post_init__(self) -> None:
        self.adam = Adam()
        self.momenta: list[torch.Tensor] = []
        self.bytes = 0.0

    def step(self, weights: torch.Tensor, gradients: list[torch.Tensor], lr: float) -> None:
        own = self.adam
        if own.steps < self.warm_up:
            self.bytes = 4.0 * weights.numel()
            update = own.update(clipped(torch.stack(gradients).mean(0)))
        else:
            m = own.m.expand_as(weights)
            self.momenta = self.momenta or [BETA1 * m for _ in gradients]
            owned = [
                m.add(clipped(g), alpha=1 - BETA1)
                for m, g in zip(self.momenta, gradients, strict=True)
            ]
            mean, sent = self.compressor(owned)
            self.momenta = [b.sub(c, alpha=1 - BETA1) for b, c in zip(owned, sent, strict=True)]
            self.bytes = self.compressor.bytes
            if self.warm_up:
                own.steps, own.m = own.steps + 1, clipped(mean)
                update = own.direction(own.m)
            else:
                update = own.update((mean - BETA1 * m) / (1 - BETA1))
        weights.mul_(1 - lr * DECAY).sub_(update, alpha=lr)


@dataclass
class CorrectedMomenta:
    """DGC's momentum correction: residuals sum the ranks' own momentum instead of gradients.

    masked: the momentum of an element that was sent starts anew. frozen: the second moment stays as
    the warm-up left it; else it becomes that of what arrives. settled: so does its bias correction.
    """

    compressor: Compressor
    warm_up: int = 0
    masked: bool = True
    frozen: bool = True
    settled: bool = False

    def __post_init__(self) -> None:
        self.adam = Adam(settled=self.settled)
        self.momenta: list[torch.Tensor] = []
        self.errors: list[torch.Tensor] = []
        self.bytes = 0.0

    def step(self, weights: torch.Tensor, gradients: list[torch.Tensor], lr: float) -> None:
        own = self.adam
        if own.steps < self.warm_up:
            self.bytes = 4.0 * weights.numel()
            update = own.update(clipped(torch.stack(gradients).mean(0)))
        else:
            m = own.m.expand_as(weights)
            self.momenta = self.momenta or [m.clone() for _ in gradients]
            self.errors = self.errors or [torch.zeros_like(weights) for _ in gradients]
            for m, e, g in zip(self.momenta, self.errors, gradients, strict=True):
                e.add_(m.lerp_(clipped(g, RANKS**-0.5), 1 - BETA1))
            mean, sent = self.compressor(self.errors)
            for m, e, c in zip(self.momenta, self.errors, sent, strict=True):
                e.sub_(c)
                if self.masked:
                    m.mul_(c == 0)
            self.bytes = self.compressor.bytes
            mean, own.steps = clipped(mean), own.steps + 1
            if not self.frozen or not self.warm_up:
                own.see(mean.square())
            update = own.direction(mean)
        weights.mul_(1 - lr * DECAY).sub_(update, alpha=lr)
