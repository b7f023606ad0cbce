"""Training with another optimizer than the one that the wrap was given."""

import pytest
import torch
import torch.distributed as dist
from bagua import BaguaError
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import every_algorithm, training

STEPS = 25


def loss_on_rank(model, step):
    return training.squared_error(model, training.batch(step, dist.get_rank()))


@training.with_group
def train_with_another_optimizer(name):
    model, _ = every_algorithm.wrapped(name, training.network())
    other = training.sgd(model, lr=0.01)
    for step in range(STEPS):
        try:
            loss_on_rank(model, step).backward()
        except BaguaError as error:
            return step, str(error)
        other.step()
        other.zero_grad()
    return STEPS, ""


DEPENDENT = ["diloco", "diloco-streaming", *every_algorithm.PEERS]


@pytest.mark.parametrize("name", DEPENDENT)
def test_an_optimizer_that_the_wrap_does_not_know_is_an_error_that_names_those_it_does(ranks, name):
    for step, error in ranks(2, train_with_another_optimizer, name):
        assert step == 21
        assert error.startswith("module 'Sequential': its parameters have changed")
        assert "no optimizer given to bagua.wrap (SGD) has made a step" in error
        assert "make it before the wrap, or call bagua.wrap again" in error


@training.with_group
def train_legitimately():
    """Many forwards without a step of the optimizer: none of these is an error."""
    model, optimizer = every_algorithm.wrapped("diloco", training.network())
    for step in range(60):  # accumulation, with and without no_sync()
        with model.no_sync():
            loss_on_rank(model, step).backward()
        loss_on_rank(model, step).backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=10**6)
    for step in range(STEPS):  # steps that a scaler skips
        optimizer.zero_grad()
        (scaler.scale(loss_on_rank(model, step)) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    exact = training.network().with_bagua([optimizer], GradientAllReduceAlgorithm())
    other = training.sgd(exact)
    for step in range(STEPS):  # gradients do not depend on the optimizer
        loss_on_rank(exact, step).backward()
        other.step()
        other.zero_grad()
    training.assert_ranks_agree(exact)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model.with_bagua([first, second], every_algorithm.made("diloco"))
    for step in range(STEPS):  # one of several optimizers
        loss_on_rank(model, step).backward()
        second.step()
        model.zero_grad()


def test_forwards_without_a_step_are_no_error_where_nothing_else_steps(ranks):
    ranks(2, train_legitimately)
