"""Training steps that run inside the forward of the wrapped module, for every algorithm.

`tests/ranks/situations/inside_forward.py` compares the exact one with torch.
"""

import torch.distributed as dist
from bagua.torch_api.algorithms import QAdamAlgorithm, QAdamOptimizer
from ranks.situations.inside_forward import Gan, toggled, untoggled
from ranks.situations.values import batch
from support import every_algorithm, training
from support.cases import over

STEPS = 5


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


@over(name=["bytegrad", "power_sgd"], train_on=[toggled, untoggled])
def test_each_backward_inside_a_forward_is_a_round(ranks, name, train_on):
    assert ranks(3, train_two_networks, name, train_on) == [2 * STEPS] * 3


#: Those that take one backward per forward, and what they say.
REFUSED = dict.fromkeys(
    every_algorithm.PEERS,
    (
        "optimizer.step() came between a training forward and the end of its",
        "compute the loss from tensors that forward returns",
    ),
) | {
    "async": (  # in its warm-up
        "a second backward through one forward",
        "With AsyncModelAverageAlgorithmImpl every forward has one backward",
    )
}


@training.with_group
def refuse(name):
    gan = Gan(untoggled)
    gan.with_bagua(list(gan.optimizers), every_algorithm.made(name))
    return training.error_of(lambda: train(gan))


@over(name=REFUSED)
def test_a_step_inside_a_forward_is_refused_with_the_remedy(ranks, name):
    for message in ranks(2, refuse, name):
        assert all(words in message for words in REFUSED[name])


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
