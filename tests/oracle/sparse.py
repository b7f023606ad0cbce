"""Sparsification with error feedback, from the formulas in plain torch, for all ranks at once.

    p_r = g_r / s + e_r;  c_r = C(p_r);  e_r <- p_r - c_r;  g <- s / P * sum of c_r in rank order

C keeps some elements as they are and makes the others zero.
"""

import math

import torch


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def largest(p, k):
    """Which are the k of largest magnitude, as a mask; NaN before infinity, of equals the first."""
    by_size = p.abs().nan_to_num(math.inf, math.inf).sort(descending=True, stable=True).indices
    nan_first = by_size[(~p[by_size].isnan()).sort(stable=True).indices]
    mask = torch.zeros(p.numel(), dtype=torch.bool)
    mask[nan_first[:k]] = True
    return mask


def top_k(brought, errors, k, scale=1.0):
    """The bucket that all ranks get, and every rank's new error."""
    kept = [g.to(wide(g.dtype)) / scale + e for g, e in zip(brought, errors, strict=True)]
    parts = [torch.where(largest(p, k), p, 0.0) for p in kept]
    total = torch.zeros_like(kept[0])
    for part in parts:
        total += part
    result = (total / (len(brought) / scale)).to(brought[0].dtype)
    if not result.isfinite().all():
        return result, errors
    return result, [p - part for p, part in zip(kept, parts, strict=True)]
