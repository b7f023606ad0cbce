"""Tensors are split into buckets: order is kept, one dtype per bucket, sizes bounded."""

import pytest
import torch
from bagua.torch_api import env
from bagua.torch_api.bucket import split_by_bucket_size

KIB = 1024


def split(sizes, bucket_kib, dtypes=None):
    """Sizes in KiB in, lists of positions out."""
    dtypes = dtypes or [torch.float32] * len(sizes)
    tensors = [
        torch.empty(size * KIB // dtype.itemsize, dtype=dtype)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    positions = {id(tensor): i for i, tensor in enumerate(tensors)}
    buckets = split_by_bucket_size(tensors, lambda tensor: tensor, bucket_kib * KIB)
    return [[positions[id(tensor)] for tensor in bucket] for bucket in buckets]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([4], [[0]], id="one"),
        pytest.param([400, 600, 4], [[0, 1, 2]], id="first-bucket-filled-to-1-mib"),
        pytest.param([800, 16384, 4], [[0], [1], [2]], id="a-large-tensor-is-alone"),
        pytest.param([4, 16384, 4], [[0, 1], [2]], id="a-tiny-bucket-waits-for-company"),
        pytest.param([1024, 6000, 4000, 4000], [[0], [1, 2], [3]], id="closed-before-it-overflows"),
    ],
)
def test_buckets_are_closed_at_their_size_and_the_first_one_early(sizes, expected):
    assert split(sizes, bucket_kib=10240) == expected


def test_a_bucket_size_below_one_mib_holds_for_the_first_bucket_too():
    assert split([8, 8, 8, 8], bucket_kib=16) == [[0, 1], [2, 3]]


def test_each_dtype_has_buckets_of_its_own_and_leaves_the_others_open():
    f32, f16 = torch.float32, torch.float16
    assert split([8, 8, 8, 8], 1024, [f32, f16, f32, f16]) == [[0, 2], [1, 3]]


def test_every_tensor_is_in_one_bucket_in_order():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 3000, (200,), generator=generator).tolist()
    buckets = split(sizes, bucket_kib=4096)
    assert [i for bucket in buckets for i in bucket] == list(range(200))
    assert all(sum(sizes[i] for i in bucket[:-1]) < 4096 for bucket in buckets)


def test_the_default_size_of_a_bucket_grows_with_many_ranks_and_a_chosen_one_does_not(monkeypatch):
    monkeypatch.delenv("BAGUA_DEFAULT_BUCKET_SIZE", raising=False)
    monkeypatch.setenv("RANK", "0")
    for ranks, cpu, cuda in ((1, 10, 32), (40, 10, 32), (64, 16, 32), (256, 64, 64)):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        assert env.get_default_bucket_size() == cpu * 2**20
        assert env.get_default_bucket_size("cuda") == cuda * 2**20
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "1000")
    assert env.get_default_bucket_size() == env.get_default_bucket_size("cuda") == 1000
