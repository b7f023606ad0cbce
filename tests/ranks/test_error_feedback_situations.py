"""Error feedback when training is not plain: warm-up, overflow, scales."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from support import training
from support.error_feedback import (
    ALGORITHMS,
    WITH_WARM_UP,
    all_bits,
    gathered_gradients,
    make,
    owed,
    train_step,
    wrapped,
)

STEPS = 8


@training.with_group
def warm_up(name, steps):
    """Bits after every step, with sparse rounds after `steps` exact ones, and without."""
    pairs = [
        wrapped(make(name, warmup_steps=steps)),
        wrapped(bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm()),
    ]
    same = []
    for step in range(STEPS):
        for model, optimizer in pairs:
            train_step(model, optimizer, step)
            training.assert_ranks_agree(model)
        same.append(training.model_bits(pairs[0][0]) == training.model_bits(pairs[1][0]))
    return same, int(pairs[0][0].bagua_algorithm.state_dict()["communications"])


@pytest.mark.parametrize("name", WITH_WARM_UP)
@pytest.mark.parametrize("steps", [0, 3])
def test_the_first_rounds_are_exact(ranks, name, steps):
    same = [step < steps for step in range(STEPS)]
    assert ranks(2, warm_up, name, steps) == [(same, STEPS - steps)] * 2


@training.with_group
def load_into_a_longer_warm_up(name):
    """Whether loaded residuals stay until the warm-up ends, and the distance of what is sent then,
    and of what is left, from gradients and loaded residuals."""
    model, optimizer = wrapped(make(name))
    for step in range(4):
        train_step(model, optimizer, step)
    saved = model.bagua_algorithm.state_dict()
    again, its_optimizer = wrapped(make(name, warmup_steps=6), seed=1)
    for step in range(8):
        train_step(again, its_optimizer, 50 + step)
    again.bagua_algorithm.load_state_dict(saved)
    same = []
    for step in (4, 5):
        loaded = again.bagua_algorithm.state_dict()
        same.append(all_bits(loaded, "rounds")[0] == all_bits(saved)[0])
        train_step(again, its_optimizer, step)
    names = [name for name, _ in again.named_parameters()]
    due = owed(training.gather(again.bagua_algorithm.state_dict()), names)
    assert any(value.any() for value in due.values())
    for gradients in (everyone := gathered_gradients(again, 6)):
        for key, gradient in gradients.items():
            due[key] += gradient / len(everyone)
    train_step(again, its_optimizer, 6)
    left = owed(training.gather(again.bagua_algorithm.state_dict()), names)
    far = [(p.grad + left[key] - due[key]).abs().max() for key, p in again.named_parameters()]
    return same, float(max(far))


@pytest.mark.parametrize("name", WITH_WARM_UP)
def test_residuals_that_are_loaded_before_the_warm_up_ends_wait_for_it(ranks, name):
    for same, distance in ranks(2, load_into_a_longer_warm_up, name):
        assert same == [True, True]
        assert distance < 1e-5


@training.with_group
def overflow_in_one_parameter(name, arguments):
    """The last layer's bias alone is not finite: other buckets' own values are."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    model, optimizer = wrapped(make(name, **arguments), grad_scaler=scaler)
    train_step(model, optimizer, 0, scaler)
    before = all_bits(model.bagua_algorithm.state_dict(), but="rounds")
    bad = float("nan") if dist.get_rank() == 1 else 1.0
    handle = model[5].bias.register_hook(lambda gradient: gradient * bad)
    train_step(model, optimizer, 1, scaler)
    handle.remove()
    after = all_bits(model.bagua_algorithm.state_dict(), but="rounds")
    others = [p.grad.isfinite().all() for n, p in model.named_parameters() if n != "5.bias"]
    return before == after, bool(all(others)), bool(model[5].bias.grad.isfinite().all())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bytegrad", {}),
        ("power_sgd", {}),
        ("sparse", {}),
        ("sparse", {"exact_parameters": ["5.*"]}),
    ],
)
def test_a_bad_bucket_leaves_the_memory_of_finite_ones(ranks, name, arguments):
    results = ranks(2, overflow_in_one_parameter, name, arguments, env=training.SMALL_BUCKETS)
    assert results == [(True, True, False)] * 2


@training.with_group
def train_scaled(name, with_scaler):
    """Weights after training with a loss scale, a power of two, or without."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=with_scaler)
    model, optimizer = wrapped(make(name), grad_scaler=scaler)
    for step in range(STEPS):
        train_step(model, optimizer, step, scaler)
    errors = {k: v for k, v in model.bagua_algorithm.state_dict().items() if "error/" in k}
    return training.bits(model.parameters()), all_bits(errors)


@ALGORITHMS
def test_memory_is_in_unscaled_units(ranks, name):
    assert ranks(2, train_scaled, name, True) == ranks(2, train_scaled, name, False)


def test_shares_of_a_bucket_have_no_residuals():
    with pytest.raises(ValueError, match=r'error_feedback=True is not supported with .*"sharded"'):
        make("bytegrad", hierarchical="sharded")
