"""Records of situations: copies of gradients, weights and buffers; small data and models."""

import torch
from torch import nn


def grads(module, prefix="grad"):
    """Copies of all gradients, None where there is none."""
    return {f"{prefix}.{n}": copied(p.grad) for n, p in module.named_parameters()}


def weights(module, prefix="weight"):
    """Copies of all parameters."""
    return {f"{prefix}.{n}": copied(p) for n, p in module.named_parameters()}


def buffers(module, prefix="buffer"):
    """Copies of all buffers."""
    return {f"{prefix}.{n}": copied(b) for n, b in module.named_buffers()}


def everything(module, prefix=""):
    """Gradients, weights and buffers."""
    return {
        f"{prefix}{name}": value
        for part in (grads(module), weights(module), buffers(module))
        for name, value in part.items()
    }


def copied(value):
    """A copy that nothing changes any more, dense."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.to_dense() if value.layout != torch.strided else value).clone()


def linear(value=1.0):
    """A weight of two elements, the same on all ranks: `x` gives itself as gradient."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def x(rank, scale=1.0):
    """The data of `linear`: the local gradient of the sum is rank + 1."""
    return torch.full((1, 2), (rank + 1.0) * scale)


def perceptron(seed=0):
    """Sizes that no number of ranks divides; without buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def normalised(seed=0):
    """A model with buffers, whose statistics depend on the data.

    Without the bias that normalisation takes away: its gradient is rounding and nothing else.
    """
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def batch(step, rank, *shape):
    """Normal numbers that depend on step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*(shape or (4, 5)), generator=generator)


def sgd(module, lr=0.1, **more):
    """Plain SGD over all parameters."""
    return torch.optim.SGD(module.parameters(), lr=lr, **more)


def train(model, optimizer, rank, steps=range(3), data=batch):
    """Trains on the mean square of the output for this rank's data of the steps."""
    for step in steps:
        optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()
        optimizer.step()


def started(wrap, module, **arguments):
    """A module, its wrapper, and SGD over its parameters."""
    optimizer = sgd(module)
    return module, wrap(module, optimizer, **arguments), optimizer


def trained(wrap, rank, module, steps=range(3), data=batch, optimizer=None, **arguments):
    """The wrapped module after some steps, and its optimizer."""
    optimizer = optimizer or sgd(module)
    model = wrap(module, optimizer, **arguments)
    train(model, optimizer, rank, steps, data)
    return model, optimizer


def alone(module, optimizer, losses, steps):
    """Trains in one process on the mean of all ranks' losses: what is right.

    losses: the losses of all ranks in a step, a list. optimizer: None where hooks step.
    """
    for step in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        parts = losses(step)
        (sum(parts) / len(parts)).backward()
        if optimizer is not None:
            optimizer.step()
    return module


def square_losses(module, size):
    """The losses that most situations have, of all ranks."""
    return lambda step: [module(batch(step, rank)).square().mean() for rank in range(size)]
