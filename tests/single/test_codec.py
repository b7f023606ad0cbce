"""Codecs against the plain-torch oracle: bytes, values, non-finite input and bad arguments."""

import math

import pytest
import torch
from bagua import _C
from oracle import codec as oracle
from support.cases import over

NAMES = _C.codec_names()
CASTS = [name for name in NAMES if oracle.CODECS[name].block == 1]
RANGED = [name for name in NAMES if oracle.CODECS[name].block != 1]
IDEMPOTENT = [name for name in NAMES if oracle.CODECS[name].idempotent]
WITH_ZERO = [name for name in RANGED if oracle.CODECS[name].has_zero]
EXACT_RESIDUAL = [name for name in NAMES if oracle.CODECS[name].exact_residual]
EIGHT_BIT = ["minmax_uint8", "block_uint8"]  # Bagua's format
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [0, 1, 2, 7, 8, 31, 32, 33, 127, 128, 129, 255, 256]
SIZES += [2047, 2048, 2049, 4096, 4097, 6000, 10007]
INF, NAN = math.inf, math.nan
FLOAT_MAX = torch.finfo(torch.float32).max


def randn(numel, seed=0, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def round_trip(name, x):
    codec = _C.make_codec(name)
    return codec.decode(codec.encode(x), 1, x.dtype, x.numel())


def assert_same(values, expected):
    """Equal bit for bit, but for which NaN a NaN is."""
    assert values.dtype == expected.dtype
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def assert_matches_oracle(name, x, chunks=1):
    codec = _C.make_codec(name)
    numel = x.numel() // chunks
    payload = codec.encode(x, chunks)
    assert torch.equal(payload, oracle.encode(name, x, chunks))
    decoded = codec.decode(payload, chunks, x.dtype, numel).view(chunks, numel)
    for part, own in zip(payload.view(chunks, -1), decoded, strict=True):
        assert_same(own, oracle.decode(name, part, x.dtype, numel))


# Values, header, codes and decoded values, as Bagua's documented steps give them.
GOLDEN = {
    "around zero": (
        "-1 -0.5 0 0.25 1",
        "000080bf0000803f",
        [0, 63, 127, 159, 255],
        "-0.996078432 -0.501960814 0 0.250980407 1.00392163",
    ),
    "positive": (
        "0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8",
        "cdcccc3dcdcc4c3f",
        [0, 37, 73, 110, 146, 183, 219, 255],
        "0.0988235474 0.200392202 0.299215734 0.400784403"
        " 0.49960795 0.60117656 0.700000107 0.798823655",
    ),
    "constant": ("3 3 3 3", "0000404000004040", [0, 0, 0, 0], "3 3 3 3"),
}


def parse(numbers):
    return torch.tensor([float(number) for number in numbers.split()])


@pytest.mark.parametrize(
    ("values", "header", "codes", "decoded"), GOLDEN.values(), ids=GOLDEN.keys()
)
@over(name=EIGHT_BIT)
def test_golden_vectors_of_bagua_are_kept(name, values, header, codes, decoded):
    payload = _C.make_codec(name).encode(parse(values))
    expected = bytes.fromhex(header).ljust(32, b"\0") + bytes(codes).ljust(32, b"\0")
    assert payload.numpy().tobytes() == expected
    assert torch.equal(round_trip(name, parse(values)), parse(decoded))


@over(name=NAMES, numel=SIZES, dtype=DTYPES)
def test_bytes_and_values_equal_the_oracle(name, numel, dtype):
    assert_matches_oracle(name, randn(numel, seed=numel, dtype=dtype))


@over(name=NAMES, chunks=range(1, 8))
def test_chunks_are_independent_and_lie_side_by_side(name, chunks):
    x = randn(chunks * 2051) * torch.arange(1, chunks + 1).repeat_interleave(2051)
    assert_matches_oracle(name, x, chunks)
    parts = [_C.make_codec(name).encode(part) for part in x.chunk(chunks)]
    assert torch.equal(_C.make_codec(name).encode(x, chunks), torch.cat(parts))


@over(name=NAMES, numel=[*SIZES, 2**31 - 1, 2**31 + 1], dtype=DTYPES)
def test_payload_bytes_are_those_of_the_layout(name, numel, dtype):
    size = _C.make_codec(name).payload_bytes(dtype, numel)
    assert size == oracle.payload_bytes(name, dtype, numel)
    assert size % 32 == 0


POISON = {
    "first": 0,
    "block end": 2047,
    "block start": 2048,
    "last partial block": 4500,
    "last": -1,
}


@over(name=NAMES, position=POISON.values(), value=[NAN, INF, -INF], dtype=DTYPES)
def test_a_non_finite_value_is_seen_and_kept_to_its_range(name, position, value, dtype):
    x = randn(5000, dtype=dtype)
    x[position] = value
    assert_matches_oracle(name, x)
    finite = round_trip(name, x).isfinite()
    expected = torch.ones(5000, dtype=torch.bool)
    block = oracle.CODECS[name].block or 5000
    start = position % 5000 // block * block
    expected[start : start + block] = False
    assert torch.equal(finite, expected)


@over(name=RANGED, lane=range(0, 70, 3))
def test_no_lane_overlooks_a_nan(name, lane):
    x = randn(70)
    x[lane] = NAN
    assert round_trip(name, x).isnan().all()


CONSTANTS = [0.0, -0.0, 1e-45, -1e-38, 1e-3, 0.002, -0.0065, 0.0066, 3.0, -7.25, 1e30, FLOAT_MAX]


@over(name=RANGED, value=[*CONSTANTS, -FLOAT_MAX])
def test_a_constant_equals_the_oracle_and_is_kept_by_eight_bits(name, value):
    x = torch.full((2500,), value)
    assert_matches_oracle(name, x)
    if name in EIGHT_BIT:
        assert torch.allclose(round_trip(name, x), x, rtol=2e-7, atol=2e-10)


EXTREMES = {
    "the whole of float": [-FLOAT_MAX, -1.0, 0.0, 1.0, FLOAT_MAX],
    "top of float": [FLOAT_MAX, FLOAT_MAX * 0.75, FLOAT_MAX * 0.5],
    "bottom of float": [-FLOAT_MAX, -FLOAT_MAX * 0.75, 0.0],
    "denormals": [1e-45, -1e-40, 1e-39, 0.0],
    "narrow and far": [1e4, 1e4 + 0.03, 1e4 + 0.06],
    "narrower than the grid": [1e6, 1e6 + 0.0625, 1e6 + 0.5],
    "negative and far": [-1e4, -1e4 - 0.03, -1e4 - 0.06],
    "mixed zeros": [0.0, -0.0, -0.0, 0.0],
    "tiny and large": [1e-30, 1e30],
}


@over(name=NAMES, values=EXTREMES.values(), dtype=DTYPES)
def test_extremes_equal_the_oracle_and_stay_finite_within_a_step(name, values, dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor(values).clamp(-largest, largest).to(dtype)
    assert_matches_oracle(name, x)
    assert_matches_oracle(name, x.repeat(1000))
    if name in RANGED:
        decoded = round_trip(name, x)
        assert decoded.isfinite().all()
        rounding = x.double().abs().max().item() * max(torch.finfo(dtype).eps, 2**-15)
        assert (decoded.double() - x.double()).abs().max() <= oracle.CODECS[name].step(x) + rounding


@over(name=RANGED, shift=[-5.0, 0.0, 2.0], scale=[1e-3, 1.0, 1e5])
def test_the_error_is_within_the_bound_of_the_codec(name, scale, shift):
    x = (randn(10007) + shift) * scale
    error = (round_trip(name, x).double() - x.double()).abs()
    for first, numel in oracle.ranges(name, 10007):
        part, own = x[first : first + numel], error[first : first + numel]
        assert (own <= oracle.CODECS[name].bound(part)).all()
        assert own.max() <= 1.001 * oracle.CODECS[name].error * part.abs().max()


@over(name=WITH_ZERO)
def test_zero_is_exact_in_a_range_around_zero(name):
    x = randn(5000)
    x[::7] = 0.0
    assert (round_trip(name, x)[::7] == 0).all()


@over(name=IDEMPOTENT, exponent=[-30, -4, 0, 4], dtype=DTYPES)
def test_decoded_values_encode_to_the_bytes_that_they_come_from(name, exponent, dtype):
    codec = _C.make_codec(name)
    x = (randn(10007, seed=exponent + 30) * 10.0**exponent).to(dtype)
    payload = codec.encode(x)
    decoded = codec.decode(payload, 1, dtype, 10007)
    assert torch.equal(codec.encode(decoded), payload)


@over(name=EXACT_RESIDUAL, exponent=[-20, 0, 4])
def test_payload_and_compression_error_add_up_exactly(name, exponent):
    x = randn(10007, seed=exponent + 20) * 10.0**exponent
    sent = round_trip(name, x)
    assert torch.equal(sent + (x - sent), x)


@over(name=NAMES, seed=range(40))
def test_random_shapes_scales_and_dtypes_equal_the_oracle(name, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return torch.randint(low, high, (), generator=generator).item()

    chunks, numel = draw(1, 5), draw(1, 5000)
    dtype = DTYPES[draw(0, 3)]
    x = torch.randn(chunks * numel, generator=generator) * 10.0 ** draw(-9, 10) + draw(-3, 4)
    if draw(0, 4) == 0:  # heavy tails
        x = x / torch.randn(chunks * numel, generator=generator)
    largest = torch.finfo(dtype).max
    assert_matches_oracle(name, x.nan_to_num(0.0).clamp(-largest, largest).to(dtype), chunks)


@over(name=NAMES, numel=[0, 1, 33, 128, 2048, 6001], dtype=DTYPES)
def test_decode_add_adds_the_output_of_decode_and_carries_nan(name, numel, dtype):
    codec = _C.make_codec(name)
    for bad in (0.0, NAN):
        x = randn(numel, dtype=dtype)
        x[-1:] += bad
        payload = codec.encode(x)
        total = randn(numel, seed=1)
        weight = torch.tensor(0.3)
        expected = total + weight * codec.decode(payload, 1, dtype, numel).float()
        codec.decode_add(payload, dtype, total, weight.item())
        assert_same(total, expected)


@over(name=CASTS, dtype=[torch.float16, torch.bfloat16])
def test_casts_agree_with_torch_on_every_16_bit_pattern(name, dtype):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_matches_oracle(name, x)


@over(name=CASTS)
def test_casts_round_as_torch_does_on_random_bits(name):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator)
    assert_matches_oracle(name, bits.to(torch.int32).view(torch.float32))


@over(name=NAMES)
def test_equal_input_gives_equal_bytes_whatever_was_in_the_buffer(name):
    codec, x = _C.make_codec(name), randn(2500)
    dirty = torch.full((codec.payload_bytes(x.dtype, 2500),), 0xA5, dtype=torch.uint8)
    codec.encode_into(x, 1, dirty)
    assert torch.equal(dirty, codec.encode(x))


@over(
    name=NAMES,
    numel=[0, 1, 31, 127, 128, 129, 257, 2048, 2051, 10007],
    scale=[1e-30, 1e-3, 1.0, 1e30],
)
def test_encode_residual_leaves_what_decoding_loses_and_the_bytes_of_encode(name, numel, scale):
    codec = _C.make_codec(name)
    x = randn(2 * numel, seed=numel) * scale
    if numel > 40:
        x[37] = NAN
    lost = x.clone()
    payload = torch.empty(2 * codec.payload_bytes(x.dtype, numel), dtype=torch.uint8)
    codec.encode_residual(lost, 2, payload)
    assert torch.equal(payload, codec.encode(x, 2))
    expected = x.clone()
    for part, own in zip(expected.view(2, -1), payload.view(2, -1), strict=True):
        codec.decode_add(own, x.dtype, part, -1.0)
    assert_same(lost, expected)
