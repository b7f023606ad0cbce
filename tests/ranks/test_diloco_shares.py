"""Shares of ranks in DiLoCo's rounds: weights by samples."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD
from ranks.test_diloco import assert_outer_state_agrees, own_step
from support import training


def wrapped(dtype=torch.float32, interval=1, **arguments):
    model = training.network().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = OuterSGD(1.0, 0.0)
    model.with_bagua([optimizer], DiLoCoAlgorithm(rule, interval, **arguments))
    return model, optimizer


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@training.with_group
def weighted(samples, codec):
    """The anchor after a round, and the mean of the ranks' weights with weights samples²."""
    model, optimizer = wrapped(torch.float64, codec=codec, weight="samples")
    before = flat(model)
    model.bagua_algorithm.count_samples(samples[dist.get_rank()])
    optimizer.zero_grad()
    batch = tuple(t.double() for t in training.batch(0, dist.get_rank()))
    training.squared_error(model, batch).backward()
    trained = before - 0.1 * torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step()
    assert_outer_state_agrees(model)
    shares = torch.tensor([float(n) ** 2 for n in samples], dtype=torch.float64)
    everyone = torch.stack(training.gather(trained))
    return flat(model), (shares[:, None] * everyone).sum(0) / shares.sum()


@pytest.mark.parametrize("samples", [(2, 1, 1), (100, 50, 0), (7, 7, 7, 5)], ids=str)
def test_the_mean_is_weighted_by_the_squares_of_samples(ranks, samples):
    for found, expected in ranks(len(samples), weighted, samples, None):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@training.with_group
def equal_weights(weight, samples):
    model, optimizer = wrapped(interval=2, codec="int4_block", weight=weight)
    for step in range(6):
        model.bagua_algorithm.count_samples(samples)
        own_step(model, optimizer, step)
    return training.bits(model.parameters())


def test_equal_weights_have_the_bits_of_the_plain_mean(ranks):
    assert ranks(3, equal_weights, "samples", 12) == ranks(3, equal_weights, "ranks", 0)


@training.with_group
def samples_that_cannot_be():
    """Errors of a round for which nobody has counted, and of a negative number."""
    model, optimizer = wrapped(weight="samples")
    return (
        training.error_of(lambda: own_step(model, optimizer, 0)),
        training.error_of(lambda: model.bagua_algorithm.count_samples(-1)),
    )


def test_samples_that_cannot_be_are_an_error_with_the_remedy(ranks):
    for nobody, negative in ranks(2, samples_that_cannot_be):
        assert "no rank has counted any" in nobody
        assert "count_samples()" in nobody
        assert "count_samples(-1)" in negative
