"""Payloads and decoded values of every codec: slow, in plain torch, by its definition.

Layouts: docs/wire-format.md. The steps of a codec are those of its header in csrc/codec/codecs.
CODECS has the oracle of each codec by its name, in the order of csrc/codec/codecs.h. An oracle has

- bits: of a code.
- block: elements that share a range; 0: the whole chunk, 1: each element stands for itself.
- error: the largest error of a round trip, as a share of the largest magnitude of a range.
- idempotent: whether decoded values encode to the bytes that they come from.
- has_zero: whether zero is a level.
- exact_residual: whether x - decoded is exact in float32.

and either `dtype`, of a cast, or what holds for rows, each of them a range:

- header_bytes(dtype): of one range.
- encode_rows(x): uint8 tensors [rows, header bytes] and [rows, elements], the headers and codes.
- decode_rows(headers, codes, dtype): the values, [rows, elements].

and for one range of finite values:

- step(x): the distance between neighbouring levels.
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
    """The values' own bytes as uint8 along the last dimension, every NaN as the one quiet NaN."""
    integer = torch.int32 if values.dtype == torch.float32 else torch.int16
    bits = values.contiguous().view(integer).clone()
    bits[values.isnan()] = QUIET_NAN_BITS[values.dtype]
    return bits.view(torch.uint8)


def bytes_of(data):
    """The bytes as a uint8 tensor."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def rows_where(rows, chosen, others):
    """By row: that of `chosen` where `rows` is true, else that of `others`."""
    return torch.where(rows.view(-1, 1), chosen, others)


def finite_in(values, dtype):
    """`values` rounded to dtype; what is too large stays the largest number."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def pack(codes, bits):
    """Rows of codes as rows of bytes: byte j has codes j, j + stride, ..., lowest bits first."""
    rows, numel = codes.shape
    stride = -(-numel * bits // 8)
    padded = torch.zeros(rows, stride * (8 // bits), dtype=torch.int32)
    padded[:, :numel] = codes
    shifts = torch.arange(0, 8, bits).view(-1, 1)
    return (padded.view(rows, -1, stride) << shifts).sum(1).to(torch.uint8)


def unpack(packed, bits, numel):
    """Rows of `numel` codes from rows of bytes."""
    shifts = torch.arange(0, 8, bits).view(-1, 1)
    codes = (packed.int().unsqueeze(1) >> shifts) & (2**bits - 1)
    return codes.flatten(1)[:, :numel].to(torch.uint8)


def grid(low, high):
    """(scale, lower, constant) of ranges, from float32 tensors of their lowest and highest."""
    # Divisions of tensors: torch computes number / tensor as number * (1 / tensor).
    width = (high - low) + torch.tensor(1e-7)
    half_width = high * 0.5 - low * 0.5
    scale = torch.where(
        width.isfinite(), torch.tensor(255.0) / width, torch.tensor(127.5) / half_width
    )
    top = high * scale
    constant = ~(top.abs() < LEVEL_LIMIT)
    lower = torch.where(constant, low + (high - low) * 0.5, top.round() - 255)
    return torch.where(constant, torch.ones(()), scale), lower, constant


class Cast:
    bits, block, idempotent = 16, 1, True
    has_zero, exact_residual = True, True

    def __init__(self, dtype):
        self.dtype = dtype
        self.error = torch.finfo(dtype).eps / 2


class RangeUint8:
    """Bagua's 8 bits, from the smallest to the largest value of a range."""

    bits, error, idempotent = 8, 1 / 255, False
    has_zero, exact_residual = True, True

    def __init__(self, block):
        self.block = block

    def header_bytes(self, dtype):
        return 2 * dtype.itemsize

    def encode_rows(self, x):
        wide, finite = x.float(), x.isfinite().all(1)
        pair = torch.stack([wide.amin(1), wide.amax(1)], 1) + 0.0  # -0 becomes +0
        pair = rows_where(finite, pair, torch.tensor(float("nan")))
        scale, lower, constant = (figure.view(-1, 1) for figure in grid(*pair.unbind(1)))
        codes = torch.maximum(wide * scale, lower).round() - lower
        codes = rows_where(finite & ~constant.view(-1), codes, torch.zeros(()))
        return element_bytes(pair.to(x.dtype)), codes.to(torch.uint8)

    def decode_rows(self, headers, codes, dtype):
        low, high = headers.view(dtype).float().unbind(1)
        scale, lower, _ = (figure.view(-1, 1) for figure in grid(low, high))
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
    has_zero, exact_residual = True, True

    def header_bytes(self, dtype):
        return torch.bfloat16.itemsize

    def encode_rows(self, x):
        wide, finite = x.float(), x.isfinite().all(1)
        size = wide.abs().amax(1) * 0.125
        scale = size.to(torch.bfloat16)
        next_scale = (scale.view(torch.int16) + 1).view(torch.bfloat16)
        scale = torch.where(scale.float() < size, next_scale, scale)
        scale = torch.where(wide.amax(1) >= -wide.amin(1), -scale, scale)
        inverse = torch.tensor(1.0) / scale.float()
        codes = (wide * inverse.view(-1, 1)).clamp(max=7).round() + 8
        tiny = size < 2.0**-100
        scale = torch.where(tiny, torch.zeros_like(scale), scale)
        scale = torch.where(finite, scale, torch.full_like(scale, float("nan")))
        codes = rows_where(tiny, torch.tensor(8.0), codes)
        codes = rows_where(finite, codes, torch.zeros(()))
        return element_bytes(scale.view(-1, 1)), codes.to(torch.uint8)

    def decode_rows(self, headers, codes, dtype):
        return finite_in((codes.float() - 8) * headers.view(torch.bfloat16).float(), dtype)

    def step(self, x):
        return max(x.double().abs().max().item() * self.error, 2.0**-97)

    def bound(self, x):
        # Beyond level 7.5 there is none but 7.
        wide, step = x.double(), self.step(x)
        side = 1 if wide.max() >= -wide.min() else -1
        return torch.where(wide * side < -7 * step, step, step / 2)


def lane_sum(values, lanes):
    """Sums of rows in float32, element i in lane i mod lanes, of which halves are added at last."""
    rows, numel = values.shape
    padded = torch.cat([values, values.new_zeros(rows, -numel % lanes)], 1)
    total = torch.zeros(rows, lanes)
    for turn in padded.view(rows, -1, lanes).unbind(1):
        total = total + turn
    while total.shape[1] > 1:
        lower, upper = total.chunk(2, 1)
        total = lower + upper
    return total.view(-1)


def mean_magnitude(shares, count):
    """As bfloat16, of the sum of magnitudes / 2^8 and their number."""
    return finite_in(shares / count.float() * 256.0, torch.bfloat16)


def signs(x):
    """0 and 1 of the values' sign bits."""
    return x.float().signbit().to(torch.uint8)


def with_signs(magnitudes, sign_bits, dtype):
    return finite_in(torch.where(sign_bits == 1, -magnitudes, magnitudes), dtype)


class Bit2Block:
    """Two magnitudes: the means above and below the root mean square."""

    bits, block, error, idempotent = 2, 256, 1.0, True
    has_zero, exact_residual = False, False

    def header_bytes(self, dtype):
        return 2 * torch.bfloat16.itemsize

    def encode_rows(self, x):
        wide, finite = x.float(), x.isfinite().all(1)
        mean = lane_sum(wide * wide, self.block // 4) / torch.tensor(float(x.shape[1]))
        above = wide.abs() > mean.sqrt().view(-1, 1)
        shares = wide.abs() / 256.0
        levels = []
        for side in (~above, above):
            share = torch.where(side, shares, torch.zeros(()))
            levels.append(mean_magnitude(lane_sum(share, self.block // 4), side.sum(1)))
        low, high = levels
        low = torch.where(above.all(1), high, low)
        high = torch.where(above.any(1), high, low)
        above &= (low != high).view(-1, 1)
        pair = rows_where(finite, torch.stack([low, high], 1), torch.full_like(low[:1], torch.nan))
        codes = signs(x) * 2 + above.to(torch.uint8)
        return element_bytes(pair), codes * finite.view(-1, 1)

    def decode_rows(self, headers, codes, dtype):
        low, high = headers.view(torch.bfloat16).float().chunk(2, 1)
        return with_signs(torch.where(codes % 2 == 1, high, low), codes // 2, dtype)

    def step(self, x):
        return x.double().abs().max().item()

    def bound(self, x):
        size = x.double().abs()
        above = size > size.square().mean().sqrt()
        # bfloat16 of a mean of which few elements may be on the other side.
        levels = torch.stack([size[side].mean() for side in (~above, above)])
        rounding = 2.0**-8 * levels[1]
        return (size - torch.where(above, levels[1], levels[0])).abs() + rounding


CODECS = {
    "minmax_uint8": RangeUint8(block=0),
    "block_uint8": RangeUint8(block=2048),
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
    "int4_block": Int4Block(),
    "bit2_block": Bit2Block(),
}


def rows_of(name, numel):
    """(rows, elements of each) of the parts of a chunk: whole ranges, and the shorter last one."""
    block = CODECS[name].block or numel
    return [(rows, n) for rows, n in ((numel // block, block), (1, numel % block)) if rows * n > 0]


def ranges(name, numel):
    """(first, numel) of the parts of a chunk that have a range each."""
    block = CODECS[name].block or max(numel, 1)
    return [(i * block, min(block, numel - i * block)) for i in range(ranges_of(name, numel))]


def ranges_of(name, numel):
    block = CODECS[name].block
    return 1 if block == 0 else -(-numel // block)


def headers_bytes(name, dtype, numel):
    return ranges_of(name, numel) * CODECS[name].header_bytes(dtype)


def payload_bytes(name, dtype, numel):
    codec = CODECS[name]
    codes = align(-(-numel * codec.bits // 8))
    return codes if codec.block == 1 else align(headers_bytes(name, dtype, numel)) + codes


def encode_chunk(name, x):
    codec = CODECS[name]
    if codec.block == 1:
        return pad(element_bytes(x.float().to(codec.dtype)).numpy().tobytes())
    if x.numel() == 0:
        return bytes(payload_bytes(name, x.dtype, 0))
    headers, packed, first = b"", b"", 0
    for rows, n in rows_of(name, x.numel()):
        of_rows, codes = codec.encode_rows(x[first : first + rows * n].view(rows, n))
        headers += of_rows.numpy().tobytes()
        packed += pack(codes, codec.bits).numpy().tobytes()
        first += rows * n
    return pad(headers) + pad(packed)


def encode(name, x, chunks=1):
    """uint8 tensor of the payloads of `chunks` equal parts of x, side by side."""
    parts = [encode_chunk(name, part) for part in x.reshape(chunks, -1)]
    return bytes_of(b"".join(parts))


def decode(name, payload, dtype, numel):
    """The values of one chunk's payload, of dtype `dtype`."""
    codec = CODECS[name]
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    if codec.block == 1:
        return payload.clone().view(codec.dtype)[:numel].float().to(dtype)
    size = codec.header_bytes(dtype)
    header_at, codes_at = 0, align(headers_bytes(name, dtype, numel))
    parts = []
    for rows, n in rows_of(name, numel):
        stride = -(-n * codec.bits // 8)
        # Copies, as a part of the payload may lie where its dtype cannot.
        headers = payload[header_at : header_at + rows * size].clone().view(rows, size)
        packed = payload[codes_at : codes_at + rows * stride].view(rows, stride)
        parts.append(codec.decode_rows(headers, unpack(packed, codec.bits, n), dtype).view(-1))
        header_at, codes_at = header_at + rows * size, codes_at + rows * stride
    return torch.cat(parts)
