"""Gradients that users replace, keep, zero, scale, or differentiate again."""

import torch
from ranks.situations.values import (
    batch,
    copied,
    everything,
    grads,
    linear,
    perceptron,
    sgd,
    started,
    weights,
    x,
)
from torch import nn


def changed(wrap, rank, change=lambda module: None, set_to_none=True):
    """A few steps, with `change(module)` between backward and optimizer."""
    module, model, optimizer = started(wrap, perceptron())
    for step in range(4):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch(step, rank)).square().mean().backward()
        change(module)
        optimizer.step()
    return everything(module)


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


def detached_gradient(wrap, rank, size):
    module = linear()
    model = wrap(module)
    model(x(rank)).sum().backward()
    module.weight.grad = module.weight.grad.detach()
    model(x(rank)).sum().backward()
    module.weight.grad.detach_()
    model(x(rank)).sum().backward()
    return grads(module)


def transposed_gradient_adopted(wrap, rank, size):
    """`.grad` has other strides than its parameter."""
    torch.manual_seed(0)
    module = nn.Linear(3, 4, bias=False)
    model = wrap(module)
    module.weight.grad = torch.arange(12.0).reshape(3, 4).t()
    model(batch(0, rank, 2, 3)).sum().backward()
    return grads(module)


def gradient_set_to_none_on_one_rank(wrap, rank, size):
    """One rank zeroes, another forgets: None and zeros are the same gradient before a round."""
    module = linear()
    model = wrap(module)
    model(x(rank)).sum().backward()
    if rank == 0:
        module.weight.grad = None
    else:
        module.weight.grad.zero_()
    model(x(rank, 10.0)).sum().backward()
    return grads(module)


def zeroed_between_forward_and_backward(wrap, rank, size):
    module, model, optimizer = started(wrap, perceptron())
    for step in range(4):
        loss = model(batch(step, rank)).square().mean()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        optimizer.step()
    return everything(module)


def some_gradients_zeroed_others_none(wrap, rank, size):
    module, model, optimizer = started(wrap, perceptron())
    for step in range(4):
        for number, p in enumerate(module.parameters()):
            if (number + step) % 2 == 0:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return everything(module)


def gradient_of_each_rank_before_the_wrap(wrap, rank, size):
    module = linear()
    module(x(rank)).sum().backward()
    model = wrap(module)
    model(x(rank)).sum().backward()
    return grads(module)


def gradient_set_between_forward_and_backward(wrap, rank, size):
    module = linear()
    model = wrap(module)
    loss = model(x(rank)).sum()
    module.weight.grad = torch.full((1, 2), 100.0)
    loss.backward()
    return grads(module)


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


def gradient_scaler_with_an_overflow_on_one_rank(wrap, rank, size):
    """All ranks skip the step, because the mean is infinite on all."""
    module, model, optimizer = started(wrap, perceptron())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).square().mean()
        if step == 1 and rank == size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(module) | {"scale": scaler.get_scale()}
