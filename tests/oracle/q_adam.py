"""QAdam after its warm-up, from the formulas in plain torch: what one step makes of what was there.

    m <- mean over ranks of beta1 m + (1 - beta1) g_rank, through a codec
    m <- m + (1 - beta1) weight_decay p
    d <- m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^w) + eps)
    p <- p - lr * min(max(d, -c), c), with c = max(1, (1 - beta1) / sqrt(1 - beta2))

v stays as it was after the w steps of the warm-up. Tensors are in dictionaries by parameter name.
"""

import torch


def local_momentum(memory, gradient, beta1):
    """beta1 m + (1 - beta1) g, with the one rounding order that torch's Adam has."""
    return torch.lerp(memory, gradient, 1 - beta1)


def decayed(momentum, weight, beta1, weight_decay):
    return momentum + (1 - beta1) * weight_decay * weight


def moved(weight, momentum, second, t, w, lr, betas, eps):
    """The new weight, in f64."""
    beta1, beta2 = betas
    scale = second.double().sqrt() / (1 - beta2**w) ** 0.5 + eps
    longest = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
    move = (momentum.double() / (1 - beta1**t) / scale).clamp(-longest, longest)
    return weight.double() - lr * move
