"""What a forward returns, and what of it enters the loss."""

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


class ReturnsItsWeight(nn.Module):
    """Gives its weight to the loss, as heads that are tied outside do."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, inputs):
        return self.layer(inputs), self.layer.weight


def a_forward_that_returns_a_parameter(wrap, rank, size):
    module = ReturnsItsWeight()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        output, weight = model(x(rank))
        (output.sum() + 0.5 * (rank + 1) * weight.sum()).backward()
        optimizer.step()
    return everything(module)


def a_forward_that_returns_only_a_parameter(wrap, rank, size):
    class OnlyWeight(nn.Module):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.ones(2))

        def forward(self):
            return self.prompt

    module = OnlyWeight()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        (model() * (rank + 1)).sum().backward()
        optimizer.step()
    return everything(module)


def a_forward_that_returns_its_input(wrap, rank, size):
    class ReturnsInput(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, inputs):
            return self.layer(inputs), inputs

    module = ReturnsInput()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    inputs = x(rank).requires_grad_()
    for _ in range(3):
        optimizer.zero_grad()
        output, same = model(inputs)
        (output.sum() + same.sum()).backward()
        optimizer.step()
    return everything(module) | {"inputs": inputs.grad}


def a_forward_without_tensors(wrap, rank, size):
    """Outputs in an object of the user's: nothing in it is found."""

    class Box:
        def __init__(self, value):
            self.value = value

    class Boxed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, inputs):
            return Box(self.layer(inputs))

    module = Boxed()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(x(rank)).value.sum().backward()
        optimizer.step()
    return everything(module)


def outputs_in_containers(wrap, rank, size):
    """Dicts, tuples, lists, named tuples and data classes of tensors."""
    import collections
    import dataclasses

    Pair = collections.namedtuple("Pair", "one other")

    @dataclasses.dataclass
    class Data:
        one: torch.Tensor

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, inputs):
            out = self.layer(inputs)
            return {"a": [out, (out * 2,)], "b": Pair(out, None), "c": Data(out * 3)}

    module = Nested()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        out = model(x(rank))
        (out["a"][1][0] + out["b"].one + out["c"].one).sum().backward()
        optimizer.step()
    return everything(module)


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
