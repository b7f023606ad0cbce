"""The sample of the weights that is hashed in each round: its elements, and what the hash sees."""

import pytest
import torch
from bagua import _C
from single.test_weights_check import DTYPES, flip_lowest_bit, values


def hashes(tensor, every=1, round_number=1):
    _, _, parts = _C.WeightsSample([("w", tensor)], every).take(round_number)
    return parts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 2, 31, 1000])
def test_every_changed_bit_changes_the_hash(dtype, numel):
    tensor = values(numel, dtype)
    seen = {tuple(hashes(tensor))}
    for index in range(numel):
        seen.add(tuple(hashes(flip_lowest_bit(tensor, index))))
    assert len(seen) == numel + 1
    assert hashes(tensor) == hashes(tensor.clone())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_order_counts(dtype):
    tensor = torch.arange(5000).to(dtype)
    orders = [tensor, tensor.flip(0), tensor.roll(1), tensor.view(50, 100).t().reshape(-1)]
    for apart in (1, 2, 2048, 4096):
        swapped = tensor.clone()
        swapped[[1, 1 + apart % 4999]] = tensor[[1 + apart % 4999, 1]]
        orders.append(swapped)
    assert len({tuple(hashes(order)) for order in orders}) == len(orders)


def test_exchanged_powers_of_two_are_seen_in_every_type():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for apart in (1, 64, 4096, 2**16):
            tensor = torch.ones(2**16 + 2, dtype=dtype)
            tensor[1] = 2
            other = torch.ones_like(tensor)
            other[1 + apart] = 2
            assert hashes(tensor) != hashes(other), (dtype, apart)


STRIDED = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "part_of_rows": lambda x: torch.cat([x, x], dim=3)[..., : x.shape[3]],
    "every_second": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "offset": lambda x: torch.cat([x, x])[x.shape[0] :],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("stride", STRIDED.values(), ids=STRIDED.keys())
def test_values_count_in_their_logical_order_whatever_the_memory(stride, dtype):
    image = torch.randn(24, 6, 5, 7).to(dtype)
    other = stride(image)
    assert other.equal(image)
    assert other.stride() != image.stride() or other.storage_offset() > 0
    for every in (1, 3):
        for round_number in range(3):
            assert hashes(other, every, round_number) == hashes(image, every, round_number)


def test_scalars_and_expanded_weights_have_a_hash():
    assert hashes(torch.tensor(1.5)) == hashes(torch.tensor([1.5]))
    assert hashes(torch.ones(3).expand(4, 3)) == hashes(torch.ones(12))


@pytest.mark.parametrize("every", [1, 2, 5, 7, 100])
@pytest.mark.parametrize("sizes", [[1], [1023], [700, 1, 1025, 3000, 0, 2047], [1] * 40 + [5003]])
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
