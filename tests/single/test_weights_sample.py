"""The hashes of weights that ranks compare: of a whole tensor, and of a sample in each round."""

import pytest
import torch
from bagua import _C
from bagua._core.state import saved_values as _saved_values
from bagua._core.state.saved_values import digest
from support.cases import over

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128),
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


def of_sample(tensor, every=1, round_number=1):
    _, _, parts = _C.WeightsSample([("w", tensor)], every).take(round_number)
    return tuple(parts)


def of_whole(tensor):
    return int(digest(tensor))


both_hashes = over(hashed=[of_sample, of_whole])


@both_hashes
@over(dtype=DTYPES, numel=[1, 2, 31, 1000])
def test_every_changed_bit_changes_the_hash(hashed, dtype, numel):
    tensor = values(numel, dtype)
    seen = {hashed(tensor)} | {hashed(flip_lowest_bit(tensor, index)) for index in range(numel)}
    assert len(seen) == numel + 1
    assert hashed(tensor) == hashed(tensor.clone())


@both_hashes
@over(dtype=[torch.float16, torch.float32, torch.float64])
def test_order_counts(hashed, dtype):
    tensor = torch.arange(5000).to(dtype)
    orders = [tensor, tensor.flip(0), tensor.roll(1), tensor.view(50, 100).t().reshape(-1)]
    for apart in (1, 2, 2048, 4096):
        swapped = tensor.clone()
        swapped[[1, 1 + apart % 4999]] = tensor[[1 + apart % 4999, 1]]
        orders.append(swapped)
    assert len({hashed(order) for order in orders}) == len(orders)


def test_exchanged_powers_of_two_are_seen_in_every_type():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for apart in (1, 64, 4096, 2**16):
            tensor = torch.ones(2**16 + 2, dtype=dtype)
            tensor[1] = 2
            other = torch.ones_like(tensor)
            other[1 + apart] = 2
            assert of_sample(tensor) != of_sample(other), (dtype, apart)


def test_chunks_of_a_whole_tensor_are_distinguished(monkeypatch):
    monkeypatch.setattr(_saved_values, "_CHUNK", 8)
    _saved_values._factors.cache_clear()
    try:
        tensor = values(35, torch.float32)
        seen = {of_whole(flip_lowest_bit(tensor, index)) for index in range(35)}
        moved = torch.cat([tensor[8:16], tensor[:8], tensor[16:]])
        seen |= {of_whole(tensor), of_whole(moved)}
        assert len(seen) == 37
    finally:
        _saved_values._factors.cache_clear()


STRIDED = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "part_of_rows": lambda x: torch.cat([x, x], dim=3)[..., : x.shape[3]],
    "every_second": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "offset": lambda x: torch.cat([x, x])[x.shape[0] :],
}


@over(dtype=[torch.bfloat16, torch.float32, torch.complex128], stride=STRIDED.values())
def test_values_count_in_their_logical_order_whatever_the_memory(stride, dtype):
    image = torch.randn(24, 6, 5, 7).to(dtype)
    other = stride(image)
    assert other.equal(image)
    assert other.stride() != image.stride() or other.storage_offset() > 0
    assert of_whole(other) == of_whole(image)
    for every in (1, 3):
        for round_number in range(3):
            found = [of_sample(tensor, every, round_number) for tensor in (image, other)]
            assert found[0] == found[1]


@both_hashes
def test_scalars_and_expanded_weights_have_a_hash(hashed):
    assert hashed(torch.tensor(1.5)) == hashed(torch.tensor([1.5]))
    assert hashed(torch.ones(3).expand(4, 3)) == hashed(torch.ones(12))
    assert hashed(torch.tensor([0.0])) != hashed(torch.tensor([-0.0]))


@over(
    every=[1, 2, 5, 7, 100],
    sizes=[[1], [1023], [700, 1, 1025, 3000, 0, 2047], [1] * 40 + [5003]],
)
def test_each_element_is_looked_at_once_in_so_many_rounds(sizes, every):
    tensors = [torch.randn(size) for size in sizes]
    sample = _C.WeightsSample([(str(i), t) for i, t in enumerate(tensors)], every)
    assert sample.windows <= every
    rounds = range(3, 3 + sample.windows)
    before = [sample.take(number) for number in rounds]
    for index, tensor in enumerate(tensors):
        for place in {0, 1, 2, 511, 1023, 1024, 1355, 2999, tensor.numel() - 1}:
            if not 0 <= place < tensor.numel():
                continue
            old = tensor[place].item()
            tensor[place] = torch.nextafter(tensor[place], torch.tensor(9.0))
            after = [sample.take(number) for number in rounds]
            tensor[place] = old
            changed = [
                first + i
                for (_, first, mine), (_, _, theirs) in zip(before, after, strict=True)
                for i, (a, b) in enumerate(zip(mine, theirs, strict=True))
                if a != b
            ]
            held = [i for i, size in enumerate(sizes) if size > 0]  # empty ones are left out
            assert [held[i] for i in changed] == [index]


def test_small_models_are_looked_at_whole_in_each_round():
    sample = _C.WeightsSample([("a", torch.ones(500)), ("b", torch.ones(524))], 100)
    assert sample.windows == 1
    assert [len(sample.take(number)[2]) for number in (1, 2)] == [2, 2]


def test_a_parameter_that_points_elsewhere_is_followed():
    parameter = torch.nn.Parameter(torch.ones(5))
    sample = _C.WeightsSample([("w", parameter)], 1)
    before = sample.take(1)[2]
    parameter.data = torch.ones(5)
    assert sample.take(1)[2] == before
    parameter.data = torch.zeros(5) + 2
    assert sample.take(1)[2] != before


def test_a_changed_weight_is_no_failure():
    changes = [
        lambda p: setattr(p, "data", torch.ones(2)),
        lambda p: setattr(p, "data", torch.ones(9, dtype=torch.float64)),
        lambda p: p.untyped_storage().resize_(0),
    ]
    for change in changes:
        parameter = torch.nn.Parameter(torch.ones(9))
        sample = _C.WeightsSample([("w", parameter)], 1)
        before = sample.take(1)[2]
        change(parameter)
        assert sample.take(1)[2] != before


@pytest.mark.parametrize(
    ("named", "every", "words"),
    [
        ([], 1, "needs weights"),
        ([("w", torch.ones(0))], 1, "needs weights"),
        ([("w", torch.ones(2))], 0, "above 0"),
        ([("a", torch.ones(2)), ("b", torch.ones(2, device="meta"))], 1, "'b' is on meta"),
    ],
)
def test_weights_that_cannot_be_sampled_are_refused(named, every, words):
    with pytest.raises(ValueError, match=words):
        _C.WeightsSample(named, every)


def test_samples_with_equal_descriptions_have_equal_windows():
    def described(named, every=100):
        return _C.WeightsSample(named, every).describe()

    weights = [("a", torch.ones(5000)), ("b", torch.ones(3))]
    assert described(weights) == described([(n, t.clone()) for n, t in weights])
    others = [weights[:1], weights[::-1], [("a", torch.ones(5000)), ("b", torch.ones(4))]]
    assert all(described(other) != described(weights) for other in others)
    assert described(weights, 2) != described(weights, 3)
