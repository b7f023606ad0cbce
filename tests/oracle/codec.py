"""Payloads and decoded values of every codec: slow, in plain torch, one range at a time.

Layouts: docs/wire-format.md. The steps of a codec are those of its header in csrc/codec/codecs.
CODECS has the oracle of each codec by its name, in the order of csrc/codec/codecs.h. An oracle has

- bits: of a code.
- block: elements that share a range; 0: the whole chunk, 1: each element stands for itself.
- error: the largest error of a round trip, as a share of the largest magnitude of a range.
- idempotent: whether decoded values encode to the bytes that they come from.

and either `dtype`, of a cast, or what holds for one range:

- header_bytes(dtype)
- encode_range(x): the header's bytes, and a uint8 tensor of codes.
- decode_range(header, codes, dtype): the values.
- step(x): the distance between neighbouring levels of a range of finite values.
- bound(x): by element, the largest error in a range of ordinary values.
"""

import torch

ALIGNMENT = 32
LEVEL_LIMIT = 2.0**24 - 256
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


def bytes_of(data):
    """The bytes as a uint8 tensor."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def finite_in(values, dtype):
    """`values` rounded to dtype; what is too large stays the largest number."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def pack(codes, bits):
    """The codes of one range as bytes: byte j has codes j, j + stride, ..., lowest bits first."""
    stride = -(-codes.numel() * bits // 8)
    padded = torch.zeros(stride * (8 // bits), dtype=torch.int32)
    padded[: codes.numel()] = codes
    shifts = torch.arange(0, 8, bits).view(-1, 1)
    return (padded.view(-1, stride) << shifts).sum(0).to(torch.uint8).numpy().tobytes()


def unpack(data, bits, numel):
    packed = bytes_of(data).int()
    shifts = torch.arange(0, 8, bits).view(-1, 1)
    return ((packed >> shifts) & (2**bits - 1)).reshape(-1)[:numel].to(torch.uint8)


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


class Cast:
    bits, block, idempotent = 16, 1, True

    def __init__(self, dtype):
        self.dtype = dtype
        self.error = torch.finfo(dtype).eps / 2


class RangeUint8:
    """Bagua's 8 bits, from the smallest to the largest value of a range."""

    bits, error, idempotent = 8, 1 / 255, False

    def __init__(self, block):
        self.block = block

    def header_bytes(self, dtype):
        return 2 * dtype.itemsize

    def encode_range(self, x):
        wide, zeros = x.float(), torch.zeros(x.numel(), dtype=torch.uint8)
        if not wide.isfinite().all():
            return element_bytes(torch.full((2,), float("nan"), dtype=x.dtype)), zeros
        pair = torch.stack([wide.min(), wide.max()]) + 0.0  # -0 becomes +0
        scale, lower, constant = grid(pair[0], pair[1])
        header = element_bytes(pair.to(x.dtype))
        if constant:
            return header, zeros
        codes = (wide * scale).clamp(min=lower.item()).round() - lower
        return header, codes.to(torch.uint8)

    def decode_range(self, header, codes, dtype):
        low, high = bytes_to_elements(header, dtype).float()
        scale, lower, _ = grid(low, high)
        return finite_in((codes.float() + lower) / scale, dtype)

    def step(self, x):
        wide = x.double()
        return ((wide.max() - wide.min() + 1e-7) / 255).item()

    def bound(self, x):
        # The level itself is rounded to float: half a unit in its last place, twice.
        rounding = 2 * x.abs().max().item() * 2**-23
        return torch.full(x.shape, self.step(x) / 2 + rounding, dtype=torch.float64)


class Int4Block:
    """16 levels from -8 to 7 times a scale; the element of largest magnitude is level -8."""

    bits, block, error, idempotent = 4, 128, (1 + 2**-7) / 8, True

    def header_bytes(self, dtype):
        return torch.bfloat16.itemsize

    def encode_range(self, x):
        wide = x.float()
        if not wide.isfinite().all():
            nan = torch.full((1,), float("nan"), dtype=torch.bfloat16)
            return element_bytes(nan), torch.zeros(x.numel(), dtype=torch.uint8)
        size = wide.abs().max() * 0.125
        if size < 2.0**-100:
            return bytes(2), torch.full((x.numel(),), 8, dtype=torch.uint8)
        scale = size.to(torch.bfloat16)
        if scale.float() < size:
            scale = (scale.view(torch.int16) + 1).view(torch.bfloat16)
        if wide.max() >= -wide.min():
            scale = -scale
        inverse = torch.tensor(1.0) / scale.float()
        codes = (wide * inverse).clamp(max=7).round() + 8
        return element_bytes(scale.view(1)), codes.to(torch.uint8)

    def decode_range(self, header, codes, dtype):
        scale = bytes_to_elements(header, torch.bfloat16).float()
        return finite_in((codes.float() - 8) * scale, dtype)

    def step(self, x):
        return max(x.double().abs().max().item() * self.error, 2.0**-97)

    def bound(self, x):
        # Beyond level 7.5 there is none but 7.
        wide, step = x.double(), self.step(x)
        side = 1 if wide.max() >= -wide.min() else -1
        return torch.where(wide * side < -7 * step, step, step / 2)


CODECS = {
    "minmax_uint8": RangeUint8(block=0),
    "block_uint8": RangeUint8(block=2048),
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
    "int4_block": Int4Block(),
}


def ranges(name, numel):
    """(first, numel) of the parts of a chunk that have a range each."""
    block = CODECS[name].block
    if block == 0:
        return [(0, numel)]
    return [(first, min(block, numel - first)) for first in range(0, numel, block)]


def headers_bytes(name, dtype, numel):
    return len(ranges(name, numel)) * CODECS[name].header_bytes(dtype)


def payload_bytes(name, dtype, numel):
    codec = CODECS[name]
    codes = align(-(-numel * codec.bits // 8))
    return codes if codec.block == 1 else align(headers_bytes(name, dtype, numel)) + codes


def encode_chunk(name, x):
    codec = CODECS[name]
    if codec.block == 1:
        return pad(element_bytes(x.float().to(codec.dtype)))
    if x.numel() == 0:
        return bytes(payload_bytes(name, x.dtype, 0))
    encoded = [codec.encode_range(x[i : i + n]) for i, n in ranges(name, x.numel())]
    headers = b"".join(header for header, _ in encoded)
    return pad(headers) + pad(b"".join(pack(codes, codec.bits) for _, codes in encoded))


def encode(name, x, chunks=1):
    """uint8 tensor of the payloads of `chunks` equal parts of x, side by side."""
    parts = [encode_chunk(name, part) for part in x.reshape(chunks, -1)]
    return bytes_of(b"".join(parts))


def decode(name, payload, dtype, numel):
    """The values of one chunk's payload, of dtype `dtype`."""
    codec, data = CODECS[name], payload.numpy().tobytes()
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    if codec.block == 1:
        return bytes_to_elements(data, codec.dtype)[:numel].float().to(dtype)
    size, at = codec.header_bytes(dtype), align(headers_bytes(name, dtype, numel))
    parts = []
    for i, (_, n) in enumerate(ranges(name, numel)):
        stride = -(-n * codec.bits // 8)
        codes = unpack(data[at : at + stride], codec.bits, n)
        parts.append(codec.decode_range(data[i * size : (i + 1) * size], codes, dtype))
        at += stride
    return torch.cat(parts)
