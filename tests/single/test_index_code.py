"""Indices of sparse messages: the smallest coding, the same back, no trust in received bytes."""

import math

import pytest
import torch
from bagua import _C

SIZES = [1, 2, 31, 64, 1000, 4097, 2**16, 2**16 + 1, 100003]


def choose(n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:k].sort().values.to(torch.uint32)


def some_k(n):
    return sorted({0, 1, n // 200, n // 40, n // 20, n // 3, n - 1, n} & set(range(n + 1)))


def sizes_of(n, k):
    """Bytes by coding, from the formulas of docs/wire-format.md."""
    return {
        "packed": math.ceil(k * (n - 1).bit_length() / 8),
        "bitmap": math.ceil(n / 8),
    }


def padded(size):
    return -(-size // 32) * 32


@pytest.mark.parametrize("n", SIZES)
def test_indices_come_back_from_the_smallest_coding(n):
    for k in some_k(n):
        indices = choose(n, k, seed=n + k)
        sizes = sizes_of(n, k)
        coding = _C.index_coding(n, k)
        assert sizes[coding] == min(sizes.values()), (n, k)
        packed = _C.pack_indices(indices, n)
        assert packed.numel() == padded(sizes[coding])
        assert torch.equal(_C.unpack_indices(packed, k, n), indices)


def test_every_coding_has_its_place():
    assert _C.index_coding(2**32, 1000) == "packed"
    assert _C.index_coding(10**6, 1000) == "packed"
    assert _C.index_coding(10**6, 10**5) == "bitmap"
    assert _C.index_coding(2**32, 2**31) == "bitmap"


def test_the_bytes_are_those_of_the_specification():
    ones = torch.tensor([0, 9, 15], dtype=torch.uint32)
    assert _C.index_coding(16, 3) == "packed"  # 12 bits instead of 16
    assert _C.pack_indices(ones, 16)[:3].tolist() == [0x90, 0x0F, 0]
    many = torch.tensor([0, 3, 8, 9, 10, 17], dtype=torch.uint32)
    assert _C.index_coding(18, 6) == "bitmap"
    assert _C.pack_indices(many, 18)[:4].tolist() == [0b1001, 0b111, 0b10, 0]


@pytest.mark.parametrize("n", [2**24 + 3, 2**32 - 1, 2**32])
def test_indices_beyond_the_integers_of_f32_survive(n):
    indices = torch.tensor([2**24 + 1, n - 1], dtype=torch.int64).to(torch.uint32)
    packed = _C.pack_indices(indices, n)
    assert packed.numel() == 32
    assert _C.unpack_indices(packed, 2, n).tolist() == [2**24 + 1, n - 1]


#: (coding, k of n elements, {byte of the packed indices 1 ... k: another}, words)
DAMAGES = {
    "equal": (3, 256, {1: 1}, r"\(packed, 3 of 256 .* number 1 is 1"),
    "descending": (3, 256, {1: 3}, "number 2 is 3"),
    "beyond": (3, 200, {2: 200}, "must ascend below 200; number 2 is 200"),
    "bitmap-of-fewer": (500, 1000, {3: 0}, r"marks 492 elements, not 500"),
    "bitmap-of-more": (500, 1000, {124: 255}, "marks 508 elements, not 500"),
    "behind-the-last": (5, 18, {0: 0b00111100, 2: 0b100}, "number 4 is 18"),
}


@pytest.mark.parametrize(("k", "n", "bytes_of", "words"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_indices_are_an_error(k, n, bytes_of, words):
    packed = _C.pack_indices(torch.arange(1, k + 1).to(torch.uint32), n)
    for place, value in bytes_of.items():
        packed[place] = value
    with pytest.raises(_C.BaguaError, match=words):
        _C.unpack_indices(packed, k, n)


def test_invalid_lists_of_indices_are_refused():
    with pytest.raises(ValueError, match="uint32, they are Long"):
        _C.pack_indices(torch.arange(3), 5)
    with pytest.raises(ValueError, match="number 1 is 2"):
        _C.pack_indices(torch.tensor([3, 2], dtype=torch.uint32), 5)
    with pytest.raises(ValueError, match="3 indices below 5 are 32 uint8, got 31"):
        _C.unpack_indices(torch.zeros(31, dtype=torch.uint8), 3, 5)
    with pytest.raises(ValueError, match="k = 6 of n = 5"):
        _C.unpack_indices(torch.zeros(32, dtype=torch.uint8), 6, 5)
