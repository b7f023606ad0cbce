"""What a forward returns, and what of it enters the loss."""

import collections
import dataclasses

import torch
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    everything,
    grads,
    linear,
    perceptron,
    sgd,
    x,
)
from torch import nn


def all_frozen_for_a_forward(wrap, rank, size):
    """The discriminator while the generator trains: gradients pass through, none arrives."""
    module = linear()
    model = wrap(module)
    module.requires_grad_(False)
    inputs = x(rank).requires_grad_()
    model(inputs).sum().backward()
    module.requires_grad_(True)
    model(x(rank)).sum().backward()
    return grads(module) | {"inputs": inputs.grad}


class Returning(nn.Module):
    """A layer whose output is `of(layer, inputs)`."""

    def __init__(self, of):
        super().__init__()
        self.layer, self.of = linear(), of

    def forward(self, inputs):
        return self.of(self.layer, inputs)


def _returning(wrap, rank, of, loss):
    """Three steps on `loss(output)`."""
    module = Returning(of)
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    inputs = x(rank).requires_grad_()
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(inputs)).backward()
        optimizer.step()
    return everything(module) | {"inputs": inputs.grad}


def a_forward_that_returns_a_parameter(wrap, rank, size):
    """Heads that are tied outside have the weight in the loss."""
    return _returning(
        wrap,
        rank,
        lambda layer, inputs: (layer(inputs), layer.weight),
        lambda output: output[0].sum() + 0.5 * (rank + 1) * output[1].sum(),
    )


def a_forward_that_returns_only_a_parameter(wrap, rank, size):
    return _returning(
        wrap,
        rank,
        lambda layer, inputs: layer.weight,
        lambda output: (output * (rank + 1)).sum(),
    )


def a_forward_that_returns_its_input(wrap, rank, size):
    return _returning(
        wrap,
        rank,
        lambda layer, inputs: (layer(inputs), inputs),
        lambda output: output[0].sum() + output[1].sum(),
    )


class Box:
    """An object of the user's: no tensor in it is found."""

    def __init__(self, value):
        self.value = value


def a_forward_without_tensors(wrap, rank, size):
    return _returning(
        wrap, rank, lambda layer, inputs: Box(layer(inputs)), lambda output: output.value.sum()
    )


Pair = collections.namedtuple("Pair", "one other")


@dataclasses.dataclass
class Data:
    one: torch.Tensor


def outputs_in_containers(wrap, rank, size):
    """Dicts, tuples, lists, named tuples and data classes of tensors."""

    def of(layer, inputs):
        out = layer(inputs)
        return {"a": [out, (out * 2,)], "b": Pair(out, None), "c": Data(out * 3)}

    def loss(output):
        return (output["a"][1][0] + output["b"].one + output["c"].one).sum()

    return _returning(wrap, rank, of, loss)


def a_rank_without_a_loss(wrap, rank, size):
    """No object in this rank's image: zero times the output."""
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        output = model(batch(step, rank))
        loss = output.sum() * 0.0 if rank == 1 else output.square().mean()
        loss.backward()
        optimizer.step()
    return everything(module)


SITUATIONS = [
    row(all_frozen_for_a_forward),
    row(a_forward_that_returns_a_parameter),
    row(a_forward_that_returns_only_a_parameter),
    row(a_forward_that_returns_its_input),
    row(a_forward_without_tensors),
    row(outputs_in_containers),
    row(a_rank_without_a_loss),
]
