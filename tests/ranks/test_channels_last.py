"""Parameters in channels_last and channels_last_3d, for every synchronous algorithm."""

import copy

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import QAdamAlgorithm, QAdamOptimizer
from support import every_algorithm, training
from support.cases import over
from support.error_feedback import owed
from torch import nn

STEPS = 5
#: Blocks of codes: their ranges depend on the order of elements in memory.
BLOCKWISE = ["bytegrad", "bytegrad-minmax", "bytegrad-feedback", "low_precision_decentralized"]
WITH_RESIDUALS = ["power_sgd", "sparse"]
#: Algorithms whose arithmetic does not depend on it.
ELEMENTWISE = [
    name
    for name in (*every_algorithm.SYNCHRONOUS, *every_algorithm.CODECS)
    if name not in (*BLOCKWISE, *WITH_RESIDUALS)
]


class Convolutions(nn.Module):
    """Weights whose sizes differ in every dimension, with and without channels_last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.flat = nn.Conv2d(3, 4, (2, 5)).to(memory_format=torch.channels_last)
        self.deep = nn.Conv3d(4, 5, (1, 2, 3)).to(memory_format=torch.channels_last_3d)
        self.head = nn.Linear(5, 2)

    def forward(self, images):
        hidden = torch.relu(self.flat(images))
        hidden = torch.tanh(self.deep(hidden.unsqueeze(2)))
        return self.head(hidden.mean((2, 3, 4)))


def contiguous(model):
    """A copy whose parameters are in the order of their dimensions."""
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        p.data = p.data.contiguous()
    return twin


def images(step):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    data = torch.randn(2, 3, 4, 9, generator=generator)
    return data.to(memory_format=torch.channels_last)


def backward(model, step):
    model.zero_grad()
    (model(images(step)) - 1).square().mean().backward()


def wrapped(name, model):
    if name != "qadam":
        return every_algorithm.wrapped(name, model)
    optimizer = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    algorithm = QAdamAlgorithm(optimizer, hierarchical=False, codec="bf16")
    return model.with_bagua([optimizer], algorithm), optimizer


def trained(name, model):
    model, optimizer = wrapped(name, model)
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        if name not in every_algorithm.OWN_WEIGHTS:
            training.assert_ranks_agree(model)
    return model


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@training.with_group
def train_in_both_orders(name):
    """The distance between the results, relative to the way that training has gone."""
    start = Convolutions()
    strides = [p.stride() for p in start.parameters()]
    mine = trained(name, copy.deepcopy(start))
    assert [p.stride() for p in mine.parameters()] == strides
    assert [p.grad.stride() for p in mine.parameters()] == strides
    theirs = trained(name, contiguous(start))
    return ((flat(mine) - flat(theirs)).norm() / (flat(theirs) - flat(start)).norm()).item()


@over(name=[*ELEMENTWISE, *BLOCKWISE])
def test_the_order_in_memory_changes_rounding_at_most(ranks, name):
    most = 0.05 if name in BLOCKWISE else 1e-4
    assert max(ranks(3, train_in_both_orders, name)) < most


@training.with_group
def send_the_same_gradient(name):
    """Without steps, all that was sent and all residuals are the mean times the rounds."""
    model, _ = wrapped(name, Convolutions())
    local = training.local_gradients(model, lambda m, d: (m(d) - 1).square().mean(), images(0))
    missing = {name: STEPS * training.mean_over_ranks(own) for name, own in local.items()}
    for _ in range(STEPS):
        backward(model, 0)
        for key, p in model.named_parameters():
            missing[key] -= p.grad
    residuals = owed(training.gather(model.bagua_algorithm.state_dict()), missing)
    for key, value in missing.items():
        torch.testing.assert_close(value, residuals[key].float(), rtol=1e-4, atol=1e-5)
    return [bool(residuals[key].any()) for key in ("flat.weight", "deep.weight")]


@over(name=WITH_RESIDUALS)
def test_what_was_sent_and_the_residual_are_the_gradient(ranks, name):
    assert ranks(3, send_the_same_gradient, name) == [[True, True]] * 3
