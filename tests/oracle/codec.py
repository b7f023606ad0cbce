"""What every codec must write and read: slow, in plain torch, one range at a time.

Layouts: docs/wire-format.md. The steps of the 8-bit codecs are those of csrc/codec/codecs.
"""

import torch

ALIGNMENT = 32
BLOCK_NUMEL = 2048
LEVEL_LIMIT = 2.0**24 - 256
CAST = {"fp16": torch.float16, "bf16": torch.bfloat16}
QUIET_NAN_BITS = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}


def align(count):
    return (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def pad(data):
    return data + bytes(align(len(data)) - len(data))


def element_bytes(values):
    """The values' own bytes, every NaN as the one quiet NaN."""
    integer = torch.int32 if values.dtype == torch.float32 else torch.int16
    bits = values.contiguous().view(integer).clone()
    bits[values.isnan()] = QUIET_NAN_BITS[values.dtype]
    return bits.view(torch.uint8).numpy().tobytes()


def bytes_to_elements(data, dtype):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


def payload_bytes(name, dtype, numel):
    if name in CAST:
        return align(2 * numel)
    ranges = 1 if name == "minmax_uint8" else -(-numel // BLOCK_NUMEL)
    return align(2 * ranges * dtype.itemsize) + align(numel)


def split(name, x):
    """The parts of a chunk that have a range each."""
    if name == "minmax_uint8":
        return [x]
    return list(x.split(BLOCK_NUMEL)) if x.numel() else []


def grid(low, high):
    """(scale, lower, constant) of a range; low and high are float32 scalars."""
    # Divisions of tensors: torch computes number / tensor as number * (1 / tensor).
    one = torch.tensor(1.0)
    width = (high - low) + torch.tensor(1e-7)
    scale = torch.tensor(255.0) / width
    if not width.isfinite():
        scale = torch.tensor(127.5) / (high * 0.5 - low * 0.5)
    top = high * scale
    if not top.abs() < LEVEL_LIMIT:
        return one, low + (high - low) * 0.5, True
    return scale, top.round() - 255, False


def encode_range(x):
    """The header pair and the codes of one range, as bytes."""
    if x.numel() == 0:
        return bytes(2 * x.dtype.itemsize), b""
    wide = x.float()
    if not wide.isfinite().all():
        pair = torch.full((2,), float("nan"), dtype=x.dtype)
        return element_bytes(pair), bytes(x.numel())
    pair = torch.stack([wide.min(), wide.max()]) + 0.0  # -0 becomes +0
    scale, lower, constant = grid(pair[0], pair[1])
    if constant:
        return element_bytes(pair.to(x.dtype)), bytes(x.numel())
    codes = ((wide * scale).clamp(min=lower.item()).round() - lower).to(torch.uint8)
    return element_bytes(pair.to(x.dtype)), codes.numpy().tobytes()


def encode_chunk(name, x):
    if name in CAST:
        return pad(element_bytes(x.float().to(CAST[name])))
    encoded = [encode_range(part) for part in split(name, x)]
    headers = b"".join(header for header, _ in encoded)
    return pad(headers) + pad(b"".join(codes for _, codes in encoded))


def encode(name, x, chunks=1):
    """uint8 tensor of the payloads of `chunks` equal parts of x, side by side."""
    parts = [encode_chunk(name, part) for part in x.reshape(chunks, -1)]
    return torch.tensor(list(b"".join(parts)), dtype=torch.uint8)


def decode_range(header, codes, dtype):
    low, high = bytes_to_elements(header, dtype).float()
    scale, lower, _ = grid(low, high)
    largest = torch.finfo(dtype).max
    return ((codes.float() + lower) / scale).clamp(-largest, largest).to(dtype)


def decode(name, payload, dtype, numel):
    """The values of one chunk's payload, of dtype `dtype`."""
    data = payload.numpy().tobytes()
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    if name in CAST:
        return bytes_to_elements(data, CAST[name])[:numel].float().to(dtype)
    size = numel if name == "minmax_uint8" else BLOCK_NUMEL
    ranges = -(-numel // size)
    pair = 2 * dtype.itemsize
    codes = payload[align(ranges * pair) :][:numel]
    parts = [
        decode_range(data[i * pair : (i + 1) * pair], codes[i * size : (i + 1) * size], dtype)
        for i in range(ranges)
    ]
    return torch.cat(parts)


def step(x):
    """The distance between neighbouring levels of a range of finite values."""
    wide = x.double()
    return ((wide.max() - wide.min() + 1e-7) / 255).item()
