"""Relative errors of the codecs on random numbers, and of residuals that are sent again."""

import pytest
import torch
from bagua import _C

NUMEL = 2**20
# Codec -> ||x - decoded|| / ||x|| for normal numbers, their cubes, and runs of other scales.
ERRORS = {
    "block_uint8": (0.0078, 0.0220, 0.0083),
    "int4_block": (0.1036, 0.1660, 0.1041),
    "bit2_block": (0.3407, 0.5838, 0.3433),
}
IDS = ["normal", "cubes", "runs"]


def runs(generator):
    """Normal numbers in runs of 30 to 30000 elements, at scales from 1e-4 to 1."""
    x = torch.randn(NUMEL, generator=generator)
    first = 0
    while first < NUMEL:
        length = int(30 * 1000 ** torch.rand((), generator=generator).item())
        x[first : first + length] *= 10 ** (-4 * torch.rand((), generator=generator).item())
        first += length
    return x


DATA = {
    "normal": lambda generator: torch.randn(NUMEL, generator=generator),
    "cubes": lambda generator: torch.randn(NUMEL, generator=generator) ** 3,
    "runs": runs,
}


def error_of(name, x):
    codec = _C.make_codec(name)
    lost = x - codec.decode(codec.encode(x), 1, x.dtype, x.numel())
    return (lost.double().norm() / x.double().norm()).item()


@pytest.mark.parametrize("data", IDS)
@pytest.mark.parametrize("name", ERRORS)
def test_the_relative_error_is_that_of_the_table(name, data):
    x = DATA[data](torch.Generator().manual_seed(7))
    assert error_of(name, x) == pytest.approx(ERRORS[name][IDS.index(data)], rel=0.02)


def test_two_magnitudes_are_an_orthogonal_projection():
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)) ** 3
    codec = _C.make_codec("bit2_block")
    sent = codec.decode(codec.encode(x), 1, x.dtype, NUMEL)
    blocks, decoded = x.double().view(-1, 256), sent.double().view(-1, 256)
    inner = ((blocks - decoded) * decoded).sum(1).abs()
    assert (inner <= 2**-8 * decoded.square().sum(1)).all()
    assert ((blocks - decoded).norm(dim=1) < blocks.norm(dim=1)).all()


@pytest.mark.parametrize("name", _C.codec_names())
def test_encode_residual_leaves_what_decoding_loses_and_the_bytes_of_encode(name):
    codec = _C.make_codec(name)
    generator = torch.Generator().manual_seed(1)
    for numel in (0, 1, 31, 127, 128, 129, 257, 2048, 2051, 10007):
        for scale in (1e-30, 1e-3, 1.0, 1e30):
            x = torch.randn(2 * numel, generator=generator) * scale
            if numel > 40:
                x[37] = float("nan")
            lost = x.clone()
            payload = torch.empty(2 * codec.payload_bytes(x.dtype, numel), dtype=torch.uint8)
            codec.encode_residual(lost, 2, payload)
            assert torch.equal(payload, codec.encode(x, 2))
            expected = x.clone()
            for part, own in zip(expected.view(2, -1), payload.view(2, -1), strict=True):
                codec.decode_add(own, x.dtype, part, -1.0)
            assert torch.equal(lost.isnan(), expected.isnan())
            assert torch.equal(lost.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


# Codec -> magnitude below which a residual without news is after 400 rounds. int4_block has a
# smallest scale; block_uint8 adds 1e-7 to each range.
DIES_OUT = {
    "int4_block": 2.0**-97,
    "bit2_block": 1e-20,
    "block_uint8": 1e-9,
}


@pytest.mark.parametrize("name", DIES_OUT)
def test_a_residual_without_news_dies_out_and_stays_finite(name):
    codec = _C.make_codec(name)
    residual = torch.randn(5000, generator=torch.Generator().manual_seed(2)) ** 3
    payload = codec.encode(residual)
    for _ in range(400):
        codec.encode_residual(residual, 1, payload)
        assert residual.isfinite().all()
    assert residual.abs().max() < DIES_OUT[name]
