"""By default each round compares a sample of the weights: only ranks that drift apart raise."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import training
from torch import nn


def wrapped(algorithm, model=None):
    model = training.network(seed=dist.get_rank()) if model is None else model
    optimizer = training.sgd(model)
    return model.with_bagua([optimizer], algorithm), optimizer


def one_step(model, optimizer, number):
    training.train(model, optimizer, [training.batch(number, dist.get_rank())])


def next_up(tensor, index):
    """The smallest change that a value can have."""
    with torch.no_grad():
        flat = tensor.view(-1)
        flat[index] = torch.nextafter(flat[index], torch.tensor(torch.inf))


def first_error(model, optimizer, steps, before_step):
    """(number of the step, message) of the first error; None if there is none."""
    for number in range(1, steps + 1):
        before_step(number)
        try:
            one_step(model, optimizer, number)
        except RuntimeError as error:
            return number, f"{type(error).__name__}: {error}"
    return None


@training.with_group
def change(culprit, model_of, name, index, when, steps, by=None):
    """One rank changes one element before step ``when``: ``by`` so much, or to the next value."""
    model, optimizer = wrapped(GradientAllReduceAlgorithm(), model_of())
    optimizer.param_groups[0]["lr"] = 0.001  # a wide model would end in NaN, which has one pattern

    def before_step(number):
        if number == when and dist.get_rank() == culprit:
            values = dict(model.named_parameters())[name].data
            next_up(values, index) if by is None else values.view(-1)[index].add_(by)

    return first_error(model, optimizer, steps, before_step)


def small():
    return training.network(seed=dist.get_rank())


def large():
    """A hundred windows."""
    width = 330
    layers = [nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


@pytest.mark.parametrize("name", ["0.bias", "4.bias"])
def test_a_change_is_found_within_a_hundred_steps_of_a_large_model(ranks, name):
    results = ranks(2, change, 1, large, name, 2, 7, 107, 0.01)
    steps = {step for step, _ in results}
    assert len(steps) == 1
    assert 7 <= steps.pop() < 107
    for _, message in results:
        assert f"First difference: '{name}' (rank 0 against rank 1)" in message


def test_zero_turns_it_off(ranks):
    env = {"BAGUA_CHECK_WEIGHTS_EVERY": "0"}
    assert ranks(2, change, 1, small, "2.weight", 4, 4, 9, env=env) == [None] * 2


@pytest.mark.parametrize(("every", "last"), [(1, 7), (3, 9)])
def test_a_number_bounds_the_steps_until_a_change_is_found(ranks, every, last):
    env = {"BAGUA_CHECK_WEIGHTS_EVERY": str(every)}
    for name in ("0.bias", "2.weight", "4.bias"):
        for step, _ in ranks(2, change, 1, large, name, 2, 7, 20, 0.01, env=env):
            assert 7 <= step <= last


@training.with_group
def makes_one_backward_more(culprit):
    model, optimizer = wrapped(GradientAllReduceAlgorithm(), small())

    def before_step(number):
        if number == 3 and dist.get_rank() == culprit:
            training.squared_error(model, training.batch(99, culprit)).backward()

    return first_error(model, optimizer, 6, before_step)


def test_one_backward_more_on_a_rank_is_among_the_causes(ranks):
    messages = [message for _, message in ranks(2, makes_one_backward_more, 1)]
    for message in messages:
        assert "ranks hold different weights" in message
        assert message.index("one backward more on a rank") < message.index("learning rates")


@training.with_group
def start_apart():
    model = DistributedDataParallel(small(), init_sync=False)
    return first_error(model, training.sgd(model), 2, lambda number: None)


def test_different_weights_at_the_wrap_raise_at_the_first_step(ranks):
    for step, message in ranks(2, start_apart):
        assert step == 1
        assert "They differed at the wrap already (init_sync=False), or since then" in message


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(training.FEATURES, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.ignored = nn.Parameter(torch.ones(3))
        self.other_name = self.shared = nn.Parameter(torch.ones(3))
        self.expert = nn.Parameter(torch.ones(3))
        self.expert.expert = True
        self.register_buffer("mean", torch.zeros(3))
        self._bagua_params_and_buffers_to_ignore = ["ignored", "shared"]

    def forward(self, inputs):
        own = self.ignored * self.other_name * self.expert
        return self.linear(inputs) * self.frozen * own + self.mean


@training.with_group
def change_a_tensor(name):
    model, optimizer = wrapped(GradientAllReduceAlgorithm(), Mixed())

    def before_step(number):
        if number == 2 and dist.get_rank() == 1:
            next_up(dict(model.named_buffers()).get(name, model.state_dict()[name]), 1)

    return first_error(model, optimizer, 4, before_step)


@pytest.mark.parametrize("name", ["linear.bias", "frozen"])
def test_trained_and_frozen_parameters_are_compared(ranks, name):
    for step, message in ranks(2, change_a_tensor, name):
        assert step == 2
        assert f"First difference: '{name}' (rank 0 against rank 1)" in message


@pytest.mark.parametrize("name", ["ignored", "other_name", "expert", "mean"])
def test_values_that_may_differ_between_ranks_are_not_compared(ranks, name):
    assert ranks(2, change_a_tensor, name) == [None] * 2


@training.with_group
def join_unevenly(gives_optimizer, then_drift):
    rank = dist.get_rank()
    model = small()
    optimizer = training.sgd(model)
    model = DistributedDataParallel(model, optimizers=[optimizer] if gives_optimizer else [])
    for epoch in range(3 if gives_optimizer else 1):
        with model.join():
            for number in range((3, 1, 3)[rank]):
                one_step(model, optimizer, 10 * epoch + number)
    assert len(set(training.gather(training.bits(model.parameters())))) == 1
    if then_drift and rank == 1:
        next_up(model.module[0].bias, 0)
    return first_error(model, optimizer, 3, lambda number: None)


def test_rounds_of_ranks_without_inputs_compare_nothing(ranks):
    assert ranks(3, join_unevenly, True, False) == [None] * 3
    for step, message in ranks(3, join_unevenly, True, True):
        assert step == 1
        assert "First difference: '0.bias'" in message


def test_momentum_missing_on_ranks_without_inputs_is_an_error(ranks):
    for step, message in ranks(3, join_unevenly, False, False):
        assert step == 2
        assert "DistributedDataParallel(optimizers=...)" in message
