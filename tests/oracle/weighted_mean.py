"""The result of a step of ranks with n_i samples, as one process that sees all of them has it.

sum(n_i g_i) / sum(n_i), in f64; zero where there are no samples. A rank without samples adds
nothing, whatever its values are.
"""

import torch


def weighted_mean(values, samples):
    total = sum(samples)
    parts = [n * v.double() for n, v in zip(samples, values, strict=True) if n]
    if not parts:
        return torch.zeros_like(values[0])
    return (torch.stack(parts).sum(0) / total).to(values[0].dtype)
