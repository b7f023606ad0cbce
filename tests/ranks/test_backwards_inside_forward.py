"""Training steps that run inside the forward of the wrapped module, for every algorithm.

`tests/ranks/situations/inside_forward.py` compares the exact one with torch.
"""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import QAdamAlgorithm, QAdamOptimizer
from ranks.situations.inside_forward import Gan, toggled, untoggled
from ranks.situations.values import batch
from support import every_algorithm, training
from support.cases import over

STEPS = 5
#: Those that may have several backwards in one forward, and that take any optimizer; the exact one
#: is in situations/.
GRADIENTS = [
    name
    for name in every_algorithm.SYNCHRONOUS
    if name not in (*every_algorithm.OWN_WEIGHTS, "qadam", "gradient_allreduce")
]


def train(gan):
    for step in range(STEPS):
        gan([batch(step, dist.get_rank())])
        training.assert_ranks_agree(gan)
    return gan.bagua_stats()["rounds"]


@training.with_group
def train_two_networks(name, train_on):
    gan = Gan(train_on)
    gan.with_bagua(list(gan.optimizers), every_algorithm.made(name))
    return train(gan)


@pytest.mark.parametrize("name", GRADIENTS)
@over(train_on=[toggled, untoggled])
def test_each_backward_inside_a_forward_is_a_round(ranks, name, train_on):
    assert ranks(3, train_two_networks, name, train_on) == [2 * STEPS] * 3


@training.with_group
def train_with_own_weights(name):
    gan = Gan(untoggled)
    gan.with_bagua(list(gan.optimizers), every_algorithm.made(name))
    return training.error_of(lambda: train(gan))


@pytest.mark.parametrize("name", every_algorithm.PEERS)
def test_a_step_inside_a_forward_is_refused_where_weights_are_averaged(ranks, name):
    for message in ranks(2, train_with_own_weights, name):
        assert "optimizer.step() came between a training forward and the end of its" in message
        assert "compute the loss from tensors that forward returns" in message


@training.with_group
def train_while_warming_up():
    gan = Gan(untoggled)
    gan.with_bagua(list(gan.optimizers), every_algorithm.made("async"))
    return training.error_of(lambda: train(gan))


def test_a_second_backward_in_the_warm_up_of_async_is_refused(ranks):
    for message in ranks(2, train_while_warming_up):
        assert "a second backward through one forward" in message
        assert "With AsyncModelAverageAlgorithmImpl every forward has one backward" in message


@training.with_group
def train_with_qadam(zeroes):
    def step(gan, inputs):
        if zeroes:
            gan.zero_grad()
        sum(gan.losses(inputs)).backward()
        gan.optimizers[0].step()

    gan = Gan(step)
    optimizer = QAdamOptimizer(gan.parameters(), lr=0.01, warmup_steps=2)
    gan.optimizers = (optimizer,)
    gan.with_bagua([optimizer], QAdamAlgorithm(optimizer, hierarchical=False))
    return train(gan) if zeroes else training.error_of(lambda: train(gan))


def test_qadam_trains_inside_a_forward(ranks):
    # The second plan begins after the warm-up.
    assert ranks(2, train_with_qadam, True) == [STEPS - 2] * 2


def test_qadam_refuses_gradients_that_still_hold_momentum_inside_a_forward(ranks):
    for message in ranks(2, train_with_qadam, False):
        assert "still holds the averaged momentum of the round before" in message


class Recomputed(torch.nn.Module):
    """A forward with one backward that begins in a reentrant checkpoint."""

    def __init__(self):
        super().__init__()
        self.network = training.network()

    def forward(self, data):
        inputs, targets = data
        output = torch.utils.checkpoint.checkpoint(
            self.network, inputs.requires_grad_(), use_reentrant=True
        )
        (output - targets).square().mean().backward()


@training.with_group
def begin_in_a_checkpoint():
    model = Recomputed()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], every_algorithm.made("gradient_allreduce"))
    return training.error_of(lambda: model(training.batch(0, dist.get_rank())))


def test_a_backward_whose_end_cannot_be_known_is_refused(ranks):
    for message in ranks(2, begin_in_a_checkpoint):
        assert message.startswith("BaguaError: ")
        assert "checkpoint(use_reentrant=False), or call backward() after the forward" in message
