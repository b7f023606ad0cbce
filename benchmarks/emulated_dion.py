"""Dion for adamw_compressors.py: orthonormal updates of low rank, of a momentum that is never sent.

K. Ahn, B. Xu, N. Abreu, J. Langford, *Dion: Distributed Orthonormalized Updates*, 2025.
"""

from dataclasses import dataclass, field

import torch
from emulated_compressors import Part
from emulated_rules import BETA1, DECAY, Rule


@dataclass
class Dion:
    """Matrices by Dion, the other parameters by `others`, which sees zeros for the matrices.

    matrices: name -> part. factor: Dion's learning rate as a multiple of AdamW's.

    1. B = M + G; 2. P = the orthonormal columns of B Q; 3. R = B^T P;
    4. M = B - (1 - mu) P R^T; 5. Q = R with columns of length 1;
    6. the weights, n x m, lose lr sqrt(n / m) P Q^T.

    All of it is linear in the ranks' M and G but for what all ranks share: their mean is enough.
    """

    matrices: list[Part]
    rank: int
    others: Rule
    factor: float
    momenta: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    queries: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    bytes: float = field(default=0.0, init=False)

    def step(self, weights: torch.Tensor, gradients: list[torch.Tensor], lr: float) -> None:
        mean = torch.stack(gradients).mean(0)
        before = weights.clone()
        rest = [gradient.clone() for gradient in gradients]
        for part in self.matrices:
            for gradient in rest:
                gradient[part.place] = 0.0
        self.others.step(weights, rest, lr)
        self.bytes = self.others.bytes
        for part in self.matrices:
            update = self._orthonormal(part, mean[part.place].view(part.shape))
            own = before[part.place].mul_(1 - lr * DECAY)
            weights[part.place] = own.sub_(update.flatten(), alpha=lr * self.factor)

    def _orthonormal(self, part: Part, gradient: torch.Tensor) -> torch.Tensor:
        rows, columns = part.shape
        rank = min(self.rank, rows, columns)
        if part.name not in self.queries:
            generator = torch.Generator().manual_seed(len(self.queries))
            self.queries[part.name] = torch.randn(columns, rank, generator=generator)
            self.momenta[part.name] = torch.zeros(rows, columns)
        self.bytes += 4.0 * rank * (rows + columns)
        owned = self.momenta[part.name] + gradient
        left = torch.linalg.qr(owned @ self.queries[part.name]).Q
        right = owned.T @ left
        self.momenta[part.name] = owned.sub(left @ right.T, alpha=1 - BETA1)
        query = right / right.norm(dim=0, keepdim=True).clamp_min(1e-12)
        self.queries[part.name] = query
        return (rows / columns) ** 0.5 * (left @ query.T)
