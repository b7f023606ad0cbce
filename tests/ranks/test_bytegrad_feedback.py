"""ByteGradAlgorithm with error feedback: bits of the oracle, situations and refusals."""

import bagua.torch_api as bagua  # noqa: F401 - gives modules with_bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm
from oracle.compressed_all_reduce import parts, with_residuals
from support import training
from support.error_feedback import train_step, wrapped
from torch import nn

STEPS = 3  # the third has residuals of residuals


def algorithm(codec="bit2_block", **arguments):
    return ByteGradAlgorithm(False, codec=codec, error_feedback=True, **arguments)


def flat_of(bucket, gradients):
    flat = torch.zeros(bucket.backend_tensor.numel())
    values = torch.cat([gradients[t.bagua_tensor_name].reshape(-1) for t in bucket.tensors])
    flat[: values.numel()] = values
    return flat, flat.numel() - values.numel()


@training.with_group
def train_as_the_oracle(codec, average):
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(training.FEATURES, 61), nn.Tanh())
    model.append(nn.Linear(61, training.OUTPUTS))
    optimizer = training.sgd(model, lr=0.02)
    model.with_bagua([optimizer], algorithm(codec, average=average))
    errors, servers = {}, {}
    for step in range(STEPS):
        by_rank = [
            training.local_gradients(model, training.squared_error, training.batch(step, rank))
            for rank in range(size)
        ]
        training.train(model, optimizer, [training.batch(step, dist.get_rank())])
        training.assert_ranks_agree(model)
        found = {name: p.grad for name, p in model.named_parameters()}
        for bucket in model.bagua_buckets:
            inputs = [flat_of(bucket, gradients)[0] for gradients in by_rank]
            flat, padding = flat_of(bucket, found)
            numel = flat.numel()
            errors.setdefault(bucket.name, [torch.zeros(numel)] * size)
            servers.setdefault(bucket.name, [torch.zeros(n) for _, n in parts(numel, size)])
            expected, errors[bucket.name], servers[bucket.name] = with_residuals(
                codec,
                inputs,
                errors[bucket.name],
                servers[bucket.name],
                average=average,
                padding=padding,
            )
            used = numel - padding
            assert torch.equal(flat[:used], expected[:used]), (step, bucket.name)
    return training.model_bits(model)


@pytest.mark.parametrize(
    ("size", "codec", "average"),
    [
        (2, "int4_block", True),
        (2, "minmax_uint8", False),
        (3, "bit2_block", False),
        (3, "block_uint8", True),
        (4, "bit2_block", True),
    ],
)
def test_gradients_have_the_bits_of_the_oracle(ranks, size, codec, average):
    results = ranks(size, train_as_the_oracle, codec, average, env=training.SMALL_BUCKETS)
    assert len(set(results)) == 1


@training.with_group
def train_in_dtype(dtype):
    model, optimizer = wrapped(algorithm(), dtype=dtype)
    for step in range(STEPS):
        train_step(model, optimizer, step)
        training.assert_ranks_agree(model)
    state = model.bagua_algorithm.state_dict()
    kept = {value.dtype for key, value in state.items() if "/error/" in key or "/server/" in key}
    return training.model_bits(model), [str(each) for each in kept]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_train_and_residuals_are_of_at_least_f32(ranks, dtype):
    results = ranks(3, train_in_dtype, dtype)
    assert len({bits for bits, _ in results}) == 1
    wide = torch.promote_types(dtype, torch.float32)
    assert all(kept == [str(wide)] for _, kept in results)


def test_shares_of_a_bucket_have_no_residuals():
    with pytest.raises(ValueError, match=r'error_feedback=True is not supported with .*"sharded"'):
        ByteGradAlgorithm("sharded", codec="int4_block", error_feedback=True)
