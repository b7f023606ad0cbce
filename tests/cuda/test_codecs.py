"""Codecs on a GPU write the bytes and the values that they write on CPU."""

import pytest
import torch
from bagua import _C
from single.test_codec import DTYPES, EXTREMES, INF, NAMES, NAN, SIZES, assert_same, randn
from support.devices import NEEDS_CUDA, over_on_each_device

# More than one block of threads, more than one launch's worth of ranges, and no multiple of either.
LARGE_SIZES = [65537, 1_000_003, 4 * 1024 * 1024 + 5]


def assert_as_on_cpu(name, x, device, chunks=1):
    """Bytes, decoded values and sums of `x`, which is on CPU; a NaN may be another NaN."""
    ours, reference = _C.make_codec(name, torch.device(device).type), _C.make_codec(name)
    numel = x.numel() // chunks
    expected = reference.encode(x, chunks)
    payload = ours.encode(x.to(device), chunks)
    assert payload.device.type == torch.device(device).type
    assert torch.equal(payload.cpu(), expected)
    decoded = ours.decode(payload, chunks, x.dtype, numel)
    assert_same(decoded.cpu(), reference.decode(expected, chunks, x.dtype, numel))
    if chunks > 1:
        return
    total = randn(numel, seed=1)
    on_device = total.to(device)
    ours.decode_add(payload, x.dtype, on_device, 0.3)
    reference.decode_add(expected, x.dtype, total, 0.3)
    assert_same(on_device.cpu(), total)


@over_on_each_device(name=NAMES, dtype=DTYPES, numel=[*SIZES, *LARGE_SIZES])
def test_any_number_of_values_gives_the_bytes_of_the_cpu(name, dtype, numel, device):
    assert_as_on_cpu(name, randn(numel, seed=numel, dtype=dtype), device)


# A thousand are more than one launch takes.
@over_on_each_device(name=NAMES, dtype=DTYPES, chunks=[1000, *range(2, 8)])
def test_several_chunks_give_the_bytes_of_the_cpu(name, dtype, chunks, device):
    for numel in (33,) if chunks == 1000 else (2051, 100_003):
        x = randn(chunks * numel) * torch.arange(1, chunks + 1).repeat_interleave(numel)
        assert_as_on_cpu(name, x.to(dtype), device, chunks)


@over_on_each_device(name=NAMES, dtype=DTYPES)
def test_values_that_are_not_finite_or_extreme_give_the_bytes_of_the_cpu(name, dtype, device):
    for position in (0, 2047, 2048, 4500, -1):  # the ends of blocks and between them
        for value in (NAN, INF, -INF):
            x = randn(5000, dtype=dtype)
            x[position] = value
            assert_as_on_cpu(name, x, device)
    largest = torch.finfo(dtype).max
    for values in [*EXTREMES.values(), [0.0], [-0.0], [1e-45], [-7.25]]:
        x = torch.tensor(values).clamp(-largest, largest).to(dtype)
        assert_as_on_cpu(name, x, device)
        assert_as_on_cpu(name, x.repeat(1000), device)


@over_on_each_device(name=NAMES, dtype=DTYPES)
def test_every_16_bit_pattern_and_random_bits_give_the_bytes_of_the_cpu(name, dtype, device):
    if dtype == torch.float32:
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator)
        x = patterns.to(torch.int32).view(dtype)
    else:
        x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_as_on_cpu(name, x, device)
    assert_as_on_cpu(name, x[x.isfinite()].contiguous(), device)


@over_on_each_device(name=NAMES, shift=range(1, 8), dtype=DTYPES)
def test_values_that_start_anywhere_give_the_same_bytes(name, shift, dtype, device):
    memory = randn(9000 + shift, dtype=dtype)
    on_device = memory.to(device)[shift:]
    ours, reference = _C.make_codec(name, device), _C.make_codec(name)
    payload = ours.encode(on_device)
    assert torch.equal(payload.cpu(), reference.encode(memory[shift:]))
    on_device.zero_()
    ours.decode_into(payload, 1, on_device)
    assert_same(on_device.cpu(), reference.decode(payload.cpu(), 1, dtype, 9000))


@pytest.mark.needs_cuda
def test_the_device_of_the_tensor_counts_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    for name in NAMES:
        assert_as_on_cpu(name, randn(10007), "cuda:1")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_tensor_of_the_other_processor_is_refused(device):
    with pytest.raises(ValueError, match="x must be a CUDA tensor, it is on cpu"):
        _C.make_codec("block_uint8", device).encode(torch.zeros(4))
    with pytest.raises(ValueError, match="x must be a CPU tensor, it is on cuda:0"):
        _C.make_codec("block_uint8").encode(torch.zeros(4, device=device))
