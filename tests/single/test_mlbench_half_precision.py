"""FP16Optimizer and its loss scale, in one process."""

import copy

import pytest
import torch
from mlbench_core.optim.pytorch.fp_optimizers import DynamicLossScaler, FP16Optimizer
from support.training import batch, bits, network, squared_error


def test_half_precision_trains_weights_of_single_precision():
    model, oracle = network().half(), network().half().float()
    optimizer = FP16Optimizer(model, 1, average_world=True, init_scale=8, scale_window=2)
    optimizer.set_optimizer(torch.optim.SGD([optimizer.fp32_params], lr=0.1))
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(step, 0)
        optimizer.zero_grad()
        optimizer.backward_loss(squared_error(model, (inputs.half(), targets.half())))
        assert optimizer.step() is True
        plain.zero_grad()
        squared_error(oracle, (inputs, targets)).backward()
        plain.step()
    assert optimizer.loss_scaler.loss_scale == 16
    expected = torch.cat([p.detach().flatten() for p in oracle.parameters()])
    torch.testing.assert_close(optimizer.fp32_params.detach(), expected, atol=2e-3, rtol=1e-2)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(weights, optimizer.fp32_params.detach().half())


def test_an_overflow_is_skipped_and_halves_the_scale():
    model = network().half()
    optimizer = FP16Optimizer(model, 1, average_world=True, init_scale=2, min_scale=0.5)
    optimizer.set_optimizer(torch.optim.SGD([optimizer.fp32_params], lr=0.1))
    before = bits(model.parameters())
    model[0].weight.grad = torch.full_like(model[0].weight, float("inf"))
    assert optimizer.step() is False
    assert optimizer.loss_scaler.loss_scale == 1
    assert bits(model.parameters()) == before
    with pytest.raises(FloatingPointError, match=r"min_scale=0\.5"):
        optimizer.step()


def test_the_state_of_half_precision_is_restored():
    model, other = network().half(), network(1).half()
    pair = []
    for trained in (model, other):
        made = FP16Optimizer(trained, 1, average_world=True, init_scale=4)
        made.set_optimizer(torch.optim.SGD([made.fp32_params], lr=0.1, momentum=0.9))
        pair.append(made)
    optimizer, restored = pair

    def step(made, trained, number):
        inputs, targets = batch(number, 0)
        made.zero_grad()
        made.backward_loss(squared_error(trained, (inputs.half(), targets.half())))
        made.step()
        return bits([made.fp32_params, *trained.parameters()])

    step(optimizer, model, 0)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert step(restored, other, 1) == step(optimizer, model, 1)


def test_the_loss_scale_grows_after_a_clean_window():
    scaler = DynamicLossScaler(init_scale=8, scale_factor=2, scale_window=3, max_scale=20)
    scales = []
    for overflow in (False, False, False, True, False, False, False, False, False, False):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [8, 8, 16, 8, 8, 8, 16, 16, 16, 20]
    assert scaler.has_overflow(float("nan"))
    assert scaler.has_overflow(torch.tensor(float("inf")))
    assert not scaler.has_overflow(torch.tensor(3.0))
