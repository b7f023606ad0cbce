"""Codecs on a GPU write the bytes and the values that they write on CPU."""

import pytest
import torch
from bagua import _C
from single.test_codec import (
    CONSTANTS,
    DTYPES,
    EXTREMES,
    INF,
    NAMES,
    NAN,
    POISON,
    SIZES,
    assert_same,
    randn,
)
from support.cases import over
from support.devices import NEEDS_CUDA, gpus, over_on_each_device

# More than one block of threads, more than one launch's worth of ranges, and no multiple of either.
LARGE_SIZES = [65537, 1_000_003, 4 * 1024 * 1024 + 5]
ON_GPUS = pytest.mark.parametrize("index", [0, 1], ids=["first", "second"])


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


@over_on_each_device(name=NAMES, numel=[*SIZES, *LARGE_SIZES], dtype=DTYPES)
def test_bytes_and_values_are_those_of_the_cpu(name, numel, dtype, device):
    assert_as_on_cpu(name, randn(numel, seed=numel, dtype=dtype), device)


@over_on_each_device(name=NAMES, chunks=range(2, 8), dtype=DTYPES)
def test_several_chunks_are_those_of_the_cpu(name, chunks, dtype, device):
    x = randn(chunks * 2051) * torch.arange(1, chunks + 1).repeat_interleave(2051)
    assert_as_on_cpu(name, x.to(dtype), device, chunks)
    assert_as_on_cpu(name, randn(chunks * 100_003, dtype=dtype), device, chunks)


@over_on_each_device(name=NAMES)
def test_more_chunks_than_one_launch_takes_are_those_of_the_cpu(name, device):
    assert_as_on_cpu(name, randn(1000 * 33), device, chunks=1000)


@over_on_each_device(name=NAMES, position=POISON.values(), value=[NAN, INF, -INF], dtype=DTYPES)
def test_non_finite_values_are_those_of_the_cpu(name, position, value, dtype, device):
    x = randn(5000, dtype=dtype)
    x[position] = value
    assert_as_on_cpu(name, x, device)


@over_on_each_device(name=NAMES, values=EXTREMES.values(), dtype=DTYPES)
def test_extremes_are_those_of_the_cpu(name, values, dtype, device):
    largest = torch.finfo(dtype).max
    x = torch.tensor(values).clamp(-largest, largest).to(dtype)
    assert_as_on_cpu(name, x, device)
    assert_as_on_cpu(name, x.repeat(1000), device)


@over_on_each_device(name=NAMES, value=CONSTANTS)
def test_constants_are_those_of_the_cpu(name, value, device):
    assert_as_on_cpu(name, torch.full((2500,), value), device)


@over_on_each_device(name=NAMES, dtype=[torch.float16, torch.bfloat16])
def test_every_16_bit_pattern_gives_the_bytes_of_the_cpu(name, dtype, device):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_as_on_cpu(name, x, device)
    assert_as_on_cpu(name, x[x.isfinite()].contiguous(), device)


@over_on_each_device(name=NAMES)
def test_random_bits_give_the_bytes_of_the_cpu(name, device):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator)
    x = bits.to(torch.int32).view(torch.float32)
    assert_as_on_cpu(name, x, device)
    assert_as_on_cpu(name, x.nan_to_num(0.0, 0.0, 0.0), device)


@over_on_each_device(name=NAMES, shift=range(1, 8), dtype=DTYPES)
def test_values_that_start_anywhere_give_the_same_bytes(name, shift, dtype, device):
    memory = randn(9000 + shift, dtype=dtype)
    x = memory[shift:]
    on_device = memory.to(device)[shift:]
    ours, reference = _C.make_codec(name, device), _C.make_codec(name)
    payload = ours.encode(on_device)
    assert torch.equal(payload.cpu(), reference.encode(x))
    on_device.zero_()
    ours.decode_into(payload, 1, on_device)
    assert_same(on_device.cpu(), reference.decode(payload.cpu(), 1, dtype, 9000))


@pytest.mark.needs_cuda
@ON_GPUS
@over(name=NAMES)
def test_the_device_of_the_tensor_counts_not_the_current_one(name, index):
    if index >= gpus():
        pytest.skip("one GPU only")
    assert_as_on_cpu(name, randn(10007), f"cuda:{index}")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_tensor_of_the_other_processor_is_refused(device):
    with pytest.raises(ValueError, match="x must be a CUDA tensor, it is on cpu"):
        _C.make_codec("block_uint8", device).encode(torch.zeros(4))
    with pytest.raises(ValueError, match="x must be a CPU tensor, it is on cuda:0"):
        _C.make_codec("block_uint8").encode(torch.zeros(4, device=device))
