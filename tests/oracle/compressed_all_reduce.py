"""What a compressed all-reduce must give, step by step in plain torch, one rank's part at a time.

The codecs appear as the round trip of their values only (encode, then decode); their bytes are the
subject of other tests. Every step is an IEEE f32 operation, so results are compared bit for bit.
"""

import torch

BLOCK = 2048
LEVEL_LIMIT = 16777216.0 - 256.0


def round_trip(codec, values):
    """`values` (one dimension: f32, f16 or bf16) after encoding as one chunk and decoding."""
    if codec == "fp16":
        return values.to(torch.float16).to(values.dtype)
    if codec == "bf16":
        return values.to(torch.bfloat16).to(values.dtype)
    size = {"minmax_uint8": max(1, values.numel()), "block_uint8": BLOCK}[codec]
    ranges = [_one_range(part) for part in values.split(size)]
    return torch.cat(ranges) if ranges else values.clone()


def _one_range(values):
    """Scale and levels of one range of values; see csrc/codec/minmax_uint8.h for the steps."""
    if values.numel() == 0:
        return values.clone()
    x = values.float()
    if not bool(x.isfinite().all()):
        return torch.full_like(values, float("nan"))
    low, high = x.min(), x.max()
    scale = torch.div(torch.tensor(255.0), (high - low) + torch.tensor(1e-7))
    top = high * scale
    if not bool(top.abs() < LEVEL_LIMIT):
        return (low + (high - low) * 0.5).expand_as(x).to(values.dtype)
    lower = top.round() - 255.0  # torch rounds ties to even
    codes = torch.maximum(x * scale, lower).round() - lower
    decoded = torch.div(codes + lower, scale.expand_as(x))
    largest = torch.finfo(values.dtype).max
    return decoded.clamp(-largest, largest).to(values.dtype)


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


def payload_bytes(codec, dtype, numel):
    """Bytes of one chunk: header and codes, or elements, each padded to 32."""

    def padded(size):
        return -(-size // 32) * 32

    if codec in ("fp16", "bf16"):
        return padded(2 * numel)
    ranges = 1 if codec == "minmax_uint8" else -(-numel // BLOCK)
    width = 2 if dtype in (torch.float16, torch.bfloat16) else 4
    return padded(ranges * 2 * width) + padded(numel)
