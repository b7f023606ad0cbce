"""Gradients that are differentiated again."""

import torch
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    copied,
    everything,
    linear,
    perceptron,
    sgd,
    x,
)


def create_graph(wrap, rank, size):
    """Gradients that can be differentiated, as for Hutchinson's estimate."""
    module = linear()
    model = wrap(module)
    result = {}
    for step in range(3):
        module.weight.grad = None
        (model(x(rank)).square().sum()).backward(create_graph=True)
        result[f"step{step}"] = copied(module.weight.grad)
        result[f"requires{step}"] = module.weight.grad.requires_grad
    return result


def create_graph_and_differentiate_again(wrap, rank, size):
    module = linear()
    model = wrap(module)
    model(x(rank)).pow(3).sum().backward(create_graph=True)
    first = copied(module.weight.grad)
    differentiable = module.weight.grad.grad_fn is not None
    result = {"first": first, "differentiable": differentiable}
    if differentiable:
        (second,) = torch.autograd.grad(module.weight.grad.sum(), module.weight)
        result["second"] = second
    return result


def create_graph_zeroed_in_place(wrap, rank, size):
    module = linear()
    optimizer = sgd(module, lr=0.01)
    model = wrap(module, optimizer)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        model(x(rank)).square().sum().backward(create_graph=True)
        optimizer.step()
    return everything(module)


def hutchinson(wrap, rank, size):
    """Adahessian: the diagonal of the Hessian by a product with a random vector."""
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    result = {}
    for step in range(2):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).square().mean()
        own = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        signs = [torch.ones_like(g) for g in own]
        products = torch.autograd.grad(own, list(module.parameters()), signs, retain_graph=True)
        loss.backward()
        optimizer.step()
        result[f"trace{step}"] = torch.stack([h.sum() for h in products]).sum()
    return result | everything(module)


SITUATIONS = [
    row(create_graph),
    row(create_graph_and_differentiate_again),
    row(create_graph_zeroed_in_place),
    row(hutchinson),
]
