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
