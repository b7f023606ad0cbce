"""Compressed reduce-scatter and all-gather, step by step in plain torch, one rank's part at a time.

Every step is an IEEE f32 operation, so results are compared bit for bit. Parts are equal.
"""

import torch
from oracle.compressed_all_reduce import round_trip


def wire_dtype(tensor):
    return torch.float32 if tensor.dtype == torch.float64 else tensor.dtype


def reduce_scatter(codec, inputs, divisor, errors=None, grad_scale=1.0):
    """(the part that each rank must hold, the residual that each rank must keep).

    inputs: one tensor of equal size and dtype per rank. errors: residuals of the round before, f32;
    None: without error feedback.
    """
    ranks = len(inputs)
    part = inputs[0].numel() // ranks
    values = [x.to(wire_dtype(x)) for x in inputs]
    if errors is not None:
        values = [
            (x.float() / grad_scale if grad_scale != 1.0 else x.float()) + e
            for x, e in zip(inputs, errors, strict=True)
        ]
        divisor /= grad_scale
    results, residuals = [], [torch.zeros(x.numel()) for x in inputs]
    for owner in range(ranks):
        place = slice(owner * part, (owner + 1) * part)
        total = torch.zeros(part)
        for rank, x in enumerate(values):  # in rank order, the owner's own version as it is
            version = x[place] if rank == owner else round_trip(codec, x[place])
            total += version.float()
            residuals[rank][place] = x[place].float() - version.float()
        if divisor != 1.0:
            total /= divisor
        results.append(total.to(inputs[0].dtype))
    return results, residuals


def all_gather(codec, shares):
    """The bucket that every rank must hold; shares: what each rank brings."""
    if len(shares) == 1:
        return shares[0].clone()
    decoded = [round_trip(codec, share.to(wire_dtype(share))) for share in shares]
    return torch.cat(decoded).to(shares[0].dtype)
