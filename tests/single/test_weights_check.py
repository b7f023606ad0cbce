"""The hash that the check of weights compares."""

import pytest
import torch
from bagua._core.state import saved_values as _saved_values
from bagua._core.state.saved_values import digest

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def values(numel, dtype):
    generator = torch.Generator().manual_seed(numel)
    return (torch.randn(numel, generator=generator) * 100).abs().to(dtype)


def flip_lowest_bit(tensor, index):
    """A copy that differs in one bit of one element."""
    copy = tensor.clone()
    bits = copy.view(torch.uint8)
    bits[index * tensor.element_size()] ^= 1
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 2, 31, 1000])
def test_every_changed_bit_changes_the_hash(dtype, numel):
    tensor = values(numel, dtype)
    seen = {int(digest(tensor))}
    for index in range(numel):
        seen.add(int(digest(flip_lowest_bit(tensor, index))))
    assert len(seen) == numel + 1
    assert digest(tensor).equal(digest(tensor.clone()))


def test_order_counts():
    tensor = torch.arange(100, dtype=torch.float32)
    orders = [tensor, tensor.flip(0), tensor.roll(1), tensor.view(10, 10).t().reshape(-1)]
    swapped = tensor.clone()
    swapped[[3, 4]] = tensor[[4, 3]]
    assert len({int(digest(order)) for order in [*orders, swapped]}) == 5


def test_chunks_are_distinguished(monkeypatch):
    monkeypatch.setattr(_saved_values, "_CHUNK", 8)
    _saved_values._factors.cache_clear()
    try:
        tensor = values(35, torch.float32)
        seen = {int(digest(flip_lowest_bit(tensor, index))) for index in range(35)}
        moved = torch.cat([tensor[8:16], tensor[:8], tensor[16:]])
        seen |= {int(digest(tensor)), int(digest(moved))}
        assert len(seen) == 37
    finally:
        _saved_values._factors.cache_clear()


def test_values_count_in_their_logical_order_whatever_the_memory():
    image = torch.randn(2, 3, 4, 5)
    assert digest(image).equal(digest(image.to(memory_format=torch.channels_last)))
    assert digest(image[:, ::2]).equal(digest(image[:, ::2].contiguous()))
    assert digest(torch.tensor(1.5)).equal(digest(torch.tensor([1.5])))


def test_zeros_of_both_signs_and_numbers_of_zeros():
    assert not digest(torch.tensor([0.0])).equal(digest(torch.tensor([-0.0])))
    assert int(digest(torch.empty(0))) == 0
