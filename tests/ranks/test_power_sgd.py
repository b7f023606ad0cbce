"""PowerSGD in training: equal ranks, the oracle's values, warm-up, overflow, nodes."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms.power_sgd import PowerSGDAlgorithm
from oracle import low_rank as oracle
from ranks import training
from ranks.error_feedback import (
    all_bits,
    error_of,
    gathered_gradients,
    train_step,
    wide_network,
    wrapped,
)
from ranks.test_groups_and_nodes import environment_of_nodes
from torch import nn

STEPS = 6


def power_sgd(**arguments):
    return PowerSGDAlgorithm(**({"rank": 2, "min_compression_rate": 1.0} | arguments))


@training.with_group
def train_and_compare(arguments, dtype):
    """Every compressed round against the oracle, from what the algorithm remembered before it."""
    model, optimizer = wrapped(power_sgd(**arguments), dtype=dtype)
    size, rank = dist.get_world_size(), dist.get_rank()
    compressed = set()
    for step in range(STEPS):
        states = training.gather(model.bagua_algorithm.state_dict())
        gradients = gathered_gradients(model, step)
        train_step(model, optimizer, step)
        training.assert_ranks_agree(model)
        after = model.bagua_algorithm.state_dict()
        for name, parameter in model.named_parameters():
            mean = sum(g[name] for g in gradients) / size
            if f"query/{name}" not in after:
                tolerance = 1e-6 if dtype == torch.float32 else 1e-14
                assert (parameter.grad - mean).abs().max() <= tolerance
                continue
            compressed.add(name)
            if step == 0:
                continue
            shape = (parameter.shape[0], -1)
            errors = [states[r][f"rank{r}/error/{name}"].reshape(shape) for r in range(size)]
            brought = [g[name].reshape(shape) for g in gradients]
            query = states[0][f"query/{name}"].T
            result, errors, query = oracle.power_step(brought, errors, query)
            tolerance = 1e-4 * result.abs().max() if dtype == torch.float32 else 1e-10
            assert (parameter.grad.reshape(shape) - result).abs().max() <= tolerance
            assert (
                error_of(after, rank, name).reshape(shape) - errors[rank]
            ).abs().max() <= tolerance
            assert (after[f"query/{name}"].T - query).abs().max() <= tolerance * 10
    return sorted(compressed)


@pytest.mark.parametrize("n", [2, 3, 4], ids=lambda n: f"{n}-ranks")
@pytest.mark.parametrize("env", [{}, training.SMALL_BUCKETS], ids=["one-bucket", "buckets"])
def test_training_follows_the_oracle_and_ranks_agree(ranks, n, env):
    assert (
        ranks(n, train_and_compare, {}, torch.float32, env=env)
        == [["0.weight", "2.weight", "5.weight"]] * n
    )


def test_f64_training_follows_the_oracle(ranks):
    assert len(ranks(2, train_and_compare, {}, torch.float64)[0]) == 3


def test_small_matrices_are_averaged_exactly(ranks):
    arguments = {"min_compression_rate": 1.5}
    assert ranks(2, train_and_compare, arguments, torch.float32)[0] == ["0.weight", "2.weight"]


@training.with_group
def train_half(dtype):
    model, optimizer = wrapped(power_sgd(), dtype=dtype)
    for step in range(STEPS):
        train_step(model, optimizer, step)
        training.assert_ranks_agree(model)
    state = model.bagua_algorithm.state_dict()
    kinds = {value.dtype for key, value in state.items() if "error/" in key}
    return kinds == {torch.float32} and all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_models_remember_in_f32(ranks, dtype):
    assert ranks(2, train_half, dtype) == [True] * 2


@training.with_group
def warm_up(steps):
    """Bits after every step, with PowerSGD after `steps` exact ones, and without."""
    pairs = [
        wrapped(power_sgd(warmup_steps=steps)),
        wrapped(bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm()),
    ]
    same = []
    for step in range(STEPS):
        for model, optimizer in pairs:
            train_step(model, optimizer, step)
            training.assert_ranks_agree(model)
        same.append(training.model_bits(pairs[0][0]) == training.model_bits(pairs[1][0]))
    return same, "query/0.weight" in pairs[0][0].bagua_algorithm.state_dict()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_first_rounds_are_exact(ranks, steps):
    expected = [step < steps for step in range(STEPS)]
    assert ranks(2, warm_up, steps) == [(expected, True)] * 2


@training.with_group
def overflow(env_buckets):
    """An overflow on one rank at the third step; the state before and after it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    model, optimizer = wrapped(power_sgd(), grad_scaler=scaler)
    seen = []
    for step in range(STEPS):
        before = all_bits(model.bagua_algorithm.state_dict(), but="rounds")
        weights = training.bits(model.parameters())
        train_step(model, optimizer, step, scaler, overflow=step == 3 and dist.get_rank() == 1)
        training.assert_ranks_agree(model)
        after = all_bits(model.bagua_algorithm.state_dict(), but="rounds")
        seen.append((before == after, weights == training.bits(model.parameters())))
    return seen, len(model.bagua_ddp.bagua_buckets)


@pytest.mark.parametrize("env", [{}, training.SMALL_BUCKETS], ids=["one-bucket", "buckets"])
def test_an_overflow_leaves_the_memory_of_every_bucket(ranks, env):
    expected = [(step == 3, step == 3) for step in range(STEPS)]
    for seen, buckets in ranks(3, overflow, bool(env), env=env):
        assert seen == expected
        assert (buckets > 1) == bool(env)


@training.with_group
def train_scaled(with_scaler):
    """Weights after training with a loss scale, a power of two, or without."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=with_scaler)
    model, optimizer = wrapped(power_sgd(), grad_scaler=scaler)
    for step in range(STEPS):
        train_step(model, optimizer, step, scaler)
    errors = {k: v for k, v in model.bagua_algorithm.state_dict().items() if "error/" in k}
    return training.bits(model.parameters()), all_bits(errors)


def test_memory_is_in_unscaled_units(ranks):
    assert ranks(2, train_scaled, True) == ranks(2, train_scaled, False)


@training.with_group
def accumulate():
    model, optimizer = wrapped(power_sgd())
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            training.squared_error(model, training.batch(100 + step, dist.get_rank())).backward()
        training.squared_error(model, training.batch(step, dist.get_rank())).backward()
        optimizer.step()
        training.assert_ranks_agree(model)
    return training.bits(model.parameters())


def test_gradients_accumulated_under_no_sync_are_sent(ranks):
    together, alone = ranks(2, accumulate), ranks(2, train_scaled, False)
    assert together[0] == together[1] != alone[0][0]


@training.with_group
def train_over_nodes():
    model, optimizer = wrapped(power_sgd(hierarchical=True))
    for step in range(STEPS):
        train_step(model, optimizer, step)
        training.assert_ranks_agree(model)
    state = model.bagua_algorithm.state_dict()
    return state["ranks"], sum("error/" in key for key in state)


def test_between_nodes_only_leaders_remember(ranks):
    results = ranks(4, train_over_nodes, env=environment_of_nodes([2, 2]))
    tensors = len(list(wide_network().parameters()))
    assert results == [("0 2", tensors), ("0 2", 0), ("0 2", tensors), ("0 2", 0)]


@training.with_group
def train_channels_last():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16, 2))
    model = model.to(memory_format=torch.channels_last)
    optimizer = training.sgd(model)
    model = model.with_bagua([optimizer], power_sgd(rank=1))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
        images = torch.randn(4, 3, 3, 3, generator=generator)
        optimizer.zero_grad()
        model(images.to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
        training.assert_ranks_agree(model)
    state = model.bagua_algorithm.state_dict()
    return state["query/0.weight"].shape, state[f"rank{dist.get_rank()}/error/0.weight"].stride()


def test_channels_last_weights_are_matrices_too(ranks):
    assert ranks(2, train_channels_last) == [((1, 27), (27, 1, 9, 3))] * 2


@training.with_group
def wrong_arguments():
    said = []
    for arguments in ({"rank": 0}, {"min_compression_rate": 0.5}, {"warmup_steps": -1}):
        with pytest.raises(ValueError, match=next(iter(arguments))) as caught:
            power_sgd(**arguments)
        said.append(str(caught.value))
    own = power_sgd(rank=1 + dist.get_rank())
    with pytest.raises(bagua.BaguaMismatchError, match="'rank': 1"):
        wrapped(own)
    return len(said)


def test_wrong_arguments_and_ranks_that_differ_are_refused(ranks):
    assert ranks(2, wrong_arguments) == [3, 3]
