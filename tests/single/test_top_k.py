"""The k largest magnitudes, exactly: whatever the values, equal ones by index, NaN first."""

import math

import pytest
import torch
from bagua import _C
from oracle.sparse import largest
from support.cases import over
from support.threads.op_ranks import SIZES

DTYPES = [torch.float32, torch.float64]
BLOCK, STRETCH = 64, 16384  # of top_k.cpp: what is tested at once, and where the bound moves


def check(x, k):
    got = _C.top_k(x, k)
    assert got.dtype == torch.uint32
    expected = largest(x, k).nonzero().flatten()
    assert torch.equal(got.to(torch.int64), expected), f"k = {k} of {x.numel()}"


def some_k(n):
    return sorted({0, 1, n // 1000, n // 100, n // 10, n // 2, n - 1, n} & set(range(n + 1)))


def random(n, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=dtype)


HARD = {
    "zeros": lambda x: x.zero_(),
    "minus-zero-and-zero": lambda x: x.sign().mul_(0),
    "equal": lambda x: x.fill_(-1.5),
    "two-values": lambda x: x.sign(),
    "ascending": lambda x: x.abs().sort().values,
    "descending": lambda x: x.abs().sort(descending=True).values,
    "denormal": lambda x: x * torch.finfo(x.dtype).smallest_normal * 2.0**-6,
    "huge": lambda x: x * (torch.finfo(x.dtype).max / 8),
    "all-exponents": lambda x: x * 2.0 ** torch.linspace(-120, 120, x.numel()),
    "equal-but-for-the-last-bit": lambda x: 1 + (x > 0) * torch.finfo(x.dtype).eps,
    "few-are-not-zero": lambda x: x * (x > 2.5),
    "crowded-below-a-power-of-two": lambda x: torch.arange(x.numel()).to(x.dtype).mul(0.37).sin(),
}


@over(dtype=DTYPES, n=[0, *SIZES, BLOCK, BLOCK + 1, STRETCH, 3 * STRETCH + 77])
def test_it_selects_the_elements_of_a_stable_sort(n, dtype):
    for k in some_k(n):
        check(random(n, dtype, seed=n + k), k)


@over(dtype=DTYPES, values=HARD.values(), n=[31, 2 * STRETCH + 33])
def test_hard_values_are_no_exception(values, dtype, n):
    x = values(random(n, dtype)).contiguous()
    for k in some_k(n):
        check(x, k)


@over(dtype=DTYPES, seed=range(50))
def test_crowds_anywhere_are_no_exception(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    n = 2 * STRETCH + 33
    width = 2.0 ** torch.randint(-20, 3, (1,), generator=generator).item()
    centre = 1 + torch.rand(1, generator=generator, dtype=dtype).item()
    crowd = centre + width * torch.rand(n, generator=generator, dtype=dtype)
    below_two = 2 - width * torch.rand(n, generator=generator, dtype=dtype) ** 4
    which = torch.rand(n, generator=generator)
    x = torch.randn(n, generator=generator, dtype=dtype)
    x = torch.where(which < 0.4, crowd, torch.where(which < 0.7, below_two, x))
    x[which > 0.999] = 2
    for k in (1, 50, 200, n // 100, n // 10, n // 3, n - 7):
        check(x, k)


@over(dtype=DTYPES)
def test_non_finite_values_come_first_and_nan_before_infinity(dtype):
    x = random(4096, dtype) * (torch.finfo(dtype).max / 10)
    x[[5, 4000]] = math.inf
    x[77] = -math.inf
    x[[100, 2000]] = math.nan
    x[3000] = -math.nan
    assert _C.top_k(x, 3).tolist() == [100, 2000, 3000]
    assert _C.top_k(x, 5).tolist() == [5, 77, 100, 2000, 3000]
    for k in range(0, 40):
        check(x, k)


def test_nans_are_equal_whatever_their_bits():
    x = torch.zeros(200)
    bits = x.view(torch.int32)
    bits[150], bits[20], bits[60] = 0x7FFFFFFF, 0x7F800001, -1  # the largest, the least, negative
    assert _C.top_k(x, 1).tolist() == [20]
    assert _C.top_k(x, 2).tolist() == [20, 60]


def test_an_index_beyond_the_integers_of_f32_survives():
    x = torch.zeros(2**24 + 3)
    x[2**24 + 1] = 1e-30
    assert _C.top_k(x, 1).tolist() == [2**24 + 1]


@pytest.mark.parametrize(
    ("x", "k", "words"),
    [
        (torch.zeros(3), 4, "k = 4 of n = 3"),
        (torch.zeros(3), -1, "k = -1"),
        (torch.zeros(3).half(), 1, "float32 or float64, it is Half"),
        (torch.zeros(2, 2), 1, "one dimension"),
        (torch.zeros(6)[::2], 1, "contiguous"),
    ],
)
def test_inputs_without_a_selection_are_refused(x, k, words):
    with pytest.raises(ValueError, match=words):
        _C.top_k(x, k)
