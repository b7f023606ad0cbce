"""Gradients that users replace, keep by reference, scale, clip, or give other strides."""

import torch
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    copied,
    everything,
    grads,
    linear,
    perceptron,
    sgd,
    train,
    weights,
    x,
)
from torch import nn


def changed(wrap, rank, change=lambda module: None, set_to_none=True):
    """A few steps, with `change(module)` between backward and optimizer."""
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch(step, rank)).square().mean().backward()
        change(module)
        optimizer.step()
    return everything(module)


def scaled_data_of_a_gradient_every_step(wrap, rank, size):
    def change(module):
        for p in module.parameters():
            p.grad.data = p.grad.data * 0.5

    return changed(wrap, rank, change)


def scaled_data_without_zeroing(wrap, rank, size):
    module = linear()
    model = wrap(module)
    result = {}
    for step in range(3):
        model(x(rank)).sum().backward()
        module.weight.grad.data = module.weight.grad.data * 2.0
        result[f"step{step}"] = copied(module.weight.grad)
    return result


def gradient_replaced_and_zeroed_in_place(wrap, rank, size):
    def change(module):
        for p in module.parameters():
            p.grad = p.grad * 0.5

    return changed(wrap, rank, change, set_to_none=False)


def gradient_replaced_on_one_rank(wrap, rank, size):
    """The same values in another tensor."""

    def change(module):
        for p in module.parameters():
            if rank == 0:
                p.grad = p.grad.clone()

    return changed(wrap, rank, change)


def _kept(wrap, rank, of):
    """What `of(gradient)` was in two steps, after both."""
    module = linear()
    model = wrap(module)
    kept = []
    for scale in (1.0, 10.0):
        module.zero_grad()
        model(x(rank, scale)).sum().backward()
        kept.append(of(module.weight.grad))
    return {"kept": kept}


def gradients_kept_by_reference(wrap, rank, size):
    """PCGrad: one backward per task, gradients collected and set to None."""
    return _kept(wrap, rank, lambda gradient: gradient)


def gradients_kept_as_views(wrap, rank, size):
    """A flat view of a gradient outlives the gradient."""
    return _kept(wrap, rank, lambda gradient: gradient.view(-1))


def gradients_kept_as_data(wrap, rank, size):
    return _kept(wrap, rank, lambda gradient: gradient.data)


def another_gradient_swapped_in(wrap, rank, size):
    """Two sets of gradients are swapped from step to step."""
    module = linear()
    model = wrap(module)
    aside, result = None, {}
    for step in range(4):
        model(x(rank, 10.0**step)).sum().backward()
        result[f"step{step}"] = copied(module.weight.grad)
        module.weight.grad, aside = aside, module.weight.grad
    return result


def clipped_by_norm(wrap, rank, size):
    def change(module):
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.05))

    norms = []
    return changed(wrap, rank, change) | {"norms": norms}


def gradients_centralised(wrap, rank, size):
    """Gradient centralisation writes through `.grad.data`."""

    def change(module):
        for p in module.parameters():
            if p.dim() > 1:
                p.grad.data.add_(-p.grad.data.mean(dim=1, keepdim=True))

    return changed(wrap, rank, change)


def detached_gradient(wrap, rank, size):
    module = linear()
    model = wrap(module)
    model(x(rank)).sum().backward()
    module.weight.grad = module.weight.grad.detach()
    model(x(rank)).sum().backward()
    module.weight.grad.detach_()
    model(x(rank)).sum().backward()
    return grads(module)


def channels_last_with_gradients_present(wrap, rank, size):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2))
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(4):
        if step == 1:
            model = model.to(memory_format=torch.channels_last)
        if step != 1:
            optimizer.zero_grad()
        model(batch(step, rank, 2, 3, 5, 5)).square().mean().backward()
        optimizer.step()
    return everything(wrap.inner(model))


def transposed_gradient_adopted(wrap, rank, size):
    """`.grad` has other strides than its parameter."""
    torch.manual_seed(0)
    module = nn.Linear(3, 4, bias=False)
    model = wrap(module)
    module.weight.grad = torch.arange(12.0).reshape(3, 4).t()
    model(batch(0, rank, 2, 3)).sum().backward()
    return grads(module)


def parameters_as_one_vector(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(3):
        vector = nn.utils.parameters_to_vector(module.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, module.parameters())
        train(model, optimizer, rank, [step])
    return weights(module)


SITUATIONS = [
    row(scaled_data_of_a_gradient_every_step),
    row(scaled_data_without_zeroing),
    row(gradient_replaced_and_zeroed_in_place),
    row(gradient_replaced_on_one_rank),
    row(gradients_kept_by_reference),
    row(gradients_kept_as_views),
    row(gradients_kept_as_data),
    row(another_gradient_swapped_in),
    row(clipped_by_norm),
    row(gradients_centralised),
    row(detached_gradient),
    row(channels_last_with_gradients_present),
    row(transposed_gradient_adopted),
    row(parameters_as_one_vector),
]
