"""Payloads and decoded values of every codec: slow, in plain torch, one range at a time.

Layouts: docs/wire-format.md. The steps of a codec are those of its header in csrc/codec/codecs.
CODECS has the oracle of each codec by its name, in the order of csrc/codec/codecs.h. An oracle has

- bits: of a code.
- block: elements that share a range; 0: the whole chunk, 1: each element stands for itself.
- error: the largest error of a round trip, as a share of the largest magnitude of a range.
- idempotent: whether decoded values encode to the bytes that they come from.
- has_zero: whether zero is a level.
- exact_residual: whether x - decoded is exact in float32.

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
    has_zero, exact_residual = True, True

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


def lane_sum(values, lanes):
    """The sum in float32, element i in lane i mod lanes, of which halves are added at last."""
    padded = torch.cat([values, values.new_zeros(-values.numel() % lanes)])
    total = torch.zeros(lanes)
    for row in padded.view(-1, lanes):
        total = total + row
    while total.numel() > 1:
        total = total[: total.numel() // 2] + total[total.numel() // 2 :]
    return total[0]


def mean_magnitude(shares, count):
    """As bfloat16, of the sum of magnitudes / 2^8 and their number."""
    mean = shares / torch.tensor(float(count)) * 256.0
    return finite_in(mean, torch.bfloat16)


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

    def encode_range(self, x):
        wide = x.float()
        if not wide.isfinite().all():
            nan = torch.full((2,), float("nan"), dtype=torch.bfloat16)
            return element_bytes(nan), torch.zeros(x.numel(), dtype=torch.uint8)
        mean = lane_sum(wide * wide, self.block // 4) / torch.tensor(float(x.numel()))
        above = wide.abs() > mean.sqrt()
        shares = wide.abs() / 256.0
        levels = []
        for side in (~above, above):
            share = torch.where(side, shares, torch.zeros(()))
            levels.append(mean_magnitude(lane_sum(share, self.block // 4), side.sum().item()))
        low, high = levels
        low = high if above.all() else low
        high = high if above.any() else low
        if low == high:
            above = torch.zeros_like(above)
        return element_bytes(torch.stack([low, high])), signs(x) * 2 + above.to(torch.uint8)

    def decode_range(self, header, codes, dtype):
        low, high = bytes_to_elements(header, torch.bfloat16).float()
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


class Bit1Block:
    """The mean magnitude, with the values' signs."""

    bits, block, error, idempotent = 1, 256, 1.0, True
    has_zero, exact_residual = False, False

    def header_bytes(self, dtype):
        return torch.bfloat16.itemsize

    def encode_range(self, x):
        wide = x.float()
        if not wide.isfinite().all():
            nan = torch.full((1,), float("nan"), dtype=torch.bfloat16)
            return element_bytes(nan), torch.zeros(x.numel(), dtype=torch.uint8)
        magnitude = mean_magnitude(lane_sum(wide.abs() / 256.0, self.block // 8), x.numel())
        return element_bytes(magnitude.view(1)), signs(x)

    def decode_range(self, header, codes, dtype):
        magnitude = bytes_to_elements(header, torch.bfloat16).float()
        return with_signs(magnitude.expand(codes.numel()), codes, dtype)

    def step(self, x):
        return x.double().abs().max().item()

    def bound(self, x):
        size = x.double().abs()
        return (size - size.mean()).abs() + 2.0**-8 * size.mean()


class E3m0Block:
    """Powers of two: seven of them below the block's largest, and zero."""

    bits, block, error, idempotent = 4, 256, 1 / 3, True
    has_zero, exact_residual = True, True

    def header_bytes(self, dtype):
        return 2

    def exponents(self, x):
        """Biased, of the powers of two nearest in value: from 1.5 times one on the next."""
        mantissa, exponent = x.float().abs().double().frexp()  # in [0.5, 1)
        nearest = exponent + 126 + (mantissa >= 0.75).int()
        return torch.where((nearest < 1) | (x == 0), torch.zeros_like(nearest), nearest)

    def encode_range(self, x):
        zeros = torch.zeros(x.numel(), dtype=torch.uint8)
        if not x.isfinite().all():
            return b"\xff\xff", zeros
        exponents = self.exponents(x)
        largest = min(254, exponents.max().item())
        if largest < 8:
            return bytes(2), zeros
        levels = (exponents - (largest - 7)).clamp(0, 7).to(torch.uint8)
        return largest.to_bytes(2, "little"), signs(x) * 8 + levels

    def decode_range(self, header, codes, dtype):
        largest = int.from_bytes(header, "little")
        if largest > 254:
            return torch.full((codes.numel(),), float("nan"), dtype=dtype)
        levels = codes.double() % 8
        powers = torch.exp2(levels + (largest - 7 - 127)) * (levels > 0) * (largest > 0)
        return with_signs(powers.float(), codes // 8, dtype)

    def step(self, x):
        # Half of what is next to the largest number; all of what is too small.
        return max(x.double().abs().max().item() / 2, 1.5 * 2.0**-120)

    def bound(self, x):
        size = x.double().abs()
        largest = min(254, self.exponents(x).max().item())
        return (size / 3).clamp(min=1.5 * 2.0 ** (largest - 7 - 127))


CODECS = {
    "minmax_uint8": RangeUint8(block=0),
    "block_uint8": RangeUint8(block=2048),
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
    "int4_block": Int4Block(),
    "bit2_block": Bit2Block(),
    "bit1_block": Bit1Block(),
    "e3m0_block": E3m0Block(),
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
