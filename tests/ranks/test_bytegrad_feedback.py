"""ByteGradAlgorithm with error feedback: bits of the oracle, situations and refusals."""

import bagua.torch_api as bagua  # noqa: F401 - gives modules with_bagua
import pytest
import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import ByteGradAlgorithm
from oracle.compressed_all_reduce import parts, with_residuals
from support import training
from support.error_feedback import owed, train_step, wrapped
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CODECS = ["int4_block", "bit2_block", "block_uint8", "minmax_uint8"]
STEPS = 6


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


@pytest.mark.parametrize("average", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [2, 3, 4], ids=lambda n: f"{n}_ranks")
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


@training.with_group
def wrap_again():
    model, optimizer = wrapped(algorithm())
    for step in range(STEPS):
        train_step(model, optimizer, step)
    state = model.bagua_algorithm.state_dict()
    model.with_bagua([optimizer], algorithm())
    model.bagua_algorithm.load_state_dict(state)
    for step in range(STEPS):
        train_step(model, optimizer, 50 + step)
        training.assert_ranks_agree(model)
    return int(model.bagua_algorithm.state_dict()["communications"])


def test_a_second_wrap_goes_on_with_the_state_of_the_first(ranks):
    assert ranks(2, wrap_again) == [2 * STEPS] * 2


@training.with_group
def smaller_buckets(state=None):
    model, optimizer = wrapped(algorithm())
    if state is None:
        for step in range(STEPS):
            train_step(model, optimizer, step)
    else:
        own = state[dist.get_rank()] if isinstance(state, list) else state
        model.bagua_algorithm.load_state_dict(own)
    return model.bagua_algorithm.state_dict(), len(model.bagua_buckets)


def test_a_state_loads_into_other_buckets_from_the_merged_dicts(ranks):
    saved = ranks(3, smaller_buckets)
    merged = {key: value for state, _ in saved for key, value in state.items()}
    loaded = ranks(3, smaller_buckets, merged, env=training.SMALL_BUCKETS)
    assert loaded[0][1] > saved[0][1]

    def server(states):
        whole = {}
        for rank, (state, _) in enumerate(states):
            for key in (key for key in state if key.startswith(f"rank{rank}/server/")):
                first, name = key.split("/", 3)[2:]
                whole.setdefault(name, {})[int(first)] = state[key]
        return {n: torch.cat([p[i] for i in sorted(p)]) for n, p in whole.items()}

    before, after = server(saved), server(loaded)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(value.any() for value in before.values())
    lacks = {key: value for key, value in merged.items() if key != "rank0/server/0/5.bias"}
    assert lacks.keys() < merged.keys()
    with pytest.raises(Exception, match=r"no server residual of .* merge what all ranks saved"):
        ranks(3, smaller_buckets, lacks, env=training.SMALL_BUCKETS)


def test_ranks_that_load_their_own_states_into_other_buckets_owe_the_same(ranks):
    saved = [state for state, _ in ranks(3, smaller_buckets)]
    loaded = ranks(3, smaller_buckets, saved, env=training.SMALL_BUCKETS)
    names = [key.removeprefix("rank0/error/") for key in saved[0] if key.startswith("rank0/error")]
    before, after = owed(saved, names), owed([state for state, _ in loaded], names)
    for name in names:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)
    assert any(value.any() for value in before.values())


@training.with_group
def hooked(codec):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(training.FEATURES, 40), nn.Tanh())
    ddp = DistributedDataParallel(model.append(nn.Linear(40, training.OUTPUTS)), bucket_cap_mb=4e-3)
    handle = comm_hooks.register(ddp, algorithm(codec))
    optimizer = training.sgd(ddp)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = training.squared_error(ddp, training.batch(step % 2, dist.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = handle.state_dict()
    handle.load_state_dict(state)
    training.squared_error(ddp, training.batch(0, dist.get_rank())).backward()
    some = [value.any().item() for key, value in state.items() if "/error/" in key]
    return training.bits(ddp.parameters()), losses[-2] < losses[0], all(some), len(some)


@pytest.mark.parametrize("codec", ["int4_block", "bit2_block"])
def test_torchs_class_takes_it_as_a_communication_hook(ranks, codec):
    results = ranks(2, hooked, codec)
    assert len({bits for bits, _, _, _ in results}) == 1
    assert [rest for _, *rest in results] == [[True, True, 4]] * 2


def test_shares_of_a_bucket_have_no_residuals():
    with pytest.raises(ValueError, match=r'error_feedback=True is not supported with .*"sharded"'):
        ByteGradAlgorithm("sharded", codec="int4_block", error_feedback=True)


@training.with_group
def differing():
    model = nn.Linear(3, 3)
    chosen = ByteGradAlgorithm(False, codec="int4_block", error_feedback=dist.get_rank() == 0)
    model.with_bagua([training.sgd(model)], chosen)


def test_ranks_with_and_without_error_feedback_get_an_error(ranks):
    with pytest.raises(Exception, match="error_feedback"):
        ranks(2, differing)
