"""The result of a compressed all-reduce, step by step in plain torch, one rank's part at a time.

Every step is an IEEE f32 operation, so results are compared bit for bit.
"""

import torch
from oracle import codec as oracle


def round_trip(codec, values):
    """`values` (one dimension: f32, f16 or bf16) after encoding as one chunk and decoding."""
    return oracle.decode(codec, oracle.encode(codec, values), values.dtype, values.numel())


def parts(numel, ranks):
    """(first, numel) of each rank's part: equal where possible, else multiples of 16."""
    stride = numel // ranks
    if numel % ranks:
        stride = (numel // ranks + 1 + 15) // 16 * 16
    firsts = [min(numel, rank * stride) for rank in range(ranks)]
    return [(first, min(stride, numel - first)) for first in firsts]


def compressed_all_reduce(codec, inputs, average):
    """The bucket that every rank must hold. inputs: one tensor of equal size and dtype per rank."""
    if len(inputs) == 1:
        return inputs[0].clone()
    wire = torch.float32 if inputs[0].dtype == torch.float64 else inputs[0].dtype
    result = torch.empty_like(inputs[0], dtype=wire)
    for first, numel in parts(inputs[0].numel(), len(inputs)):
        total = torch.zeros(numel)
        for values in inputs:  # in rank order
            total += round_trip(codec, values[first : first + numel].to(wire)).float()
        if average:
            total /= len(inputs)
        result[first : first + numel] = round_trip(codec, total.to(wire))
    return result.to(inputs[0].dtype)


def with_residuals(codec, inputs, errors, servers, scale=1.0, average=True, padding=0):
    """The same with error feedback: (bucket of every rank, residuals, residuals of the parts).

    errors: f32 or f64, one per rank, as long as the bucket. servers: likewise, as long as its part.
    scale: that the inputs carry. padding: elements at the end that are always zero.
    """
    ranks, numel, wide = len(inputs), inputs[0].numel(), errors[0].dtype
    scale = torch.tensor(scale)
    corrected = [v.to(wide) / scale + e for v, e in zip(inputs, errors, strict=True)]
    kept = [torch.empty(numel, dtype=wide) for _ in range(ranks)]
    parts_kept, result = [], torch.empty(numel, dtype=wide)
    for (first, size), server in zip(parts(numel, ranks), servers, strict=True):
        total = torch.zeros(size, dtype=wide)
        for own, p in zip(kept, corrected, strict=True):
            sent = round_trip(codec, p[first : first + size].float()).to(wide)
            own[first : first + size] = p[first : first + size] - sent
            total += sent
        q = total / ranks + server
        sent = round_trip(codec, q.float()).to(wide)
        result[first : first + size] = sent
        left = q - sent
        left[max(0, numel - padding - first) :] = 0
        parts_kept.append(left)
    for own in kept:
        own[numel - padding :] = 0
    factor = scale if average else scale * ranks
    return (result * factor).to(inputs[0].dtype), kept, parts_kept
