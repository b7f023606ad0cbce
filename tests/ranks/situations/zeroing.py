"""Gradients that are zeroed in every way, or are there already when a backward adds to them."""

import torch
from ranks.situations.gradients import changed
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


def zeroed_in_place_by_the_optimizer(wrap, rank, size):
    return changed(wrap, rank, set_to_none=False)


def zeroed_between_forward_and_backward(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(4):
        loss = model(batch(step, rank)).square().mean()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        optimizer.step()
    return everything(wrap.inner(model))


def never_zeroed(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(4):
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return everything(module)


def some_gradients_zeroed_others_none(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(4):
        for number, p in enumerate(module.parameters()):
            if (number + step) % 2 == 0:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return everything(wrap.inner(model))


def gradient_that_was_there_before_the_wrap(wrap, rank, size):
    module = linear()
    module.weight.grad = torch.full((1, 2), 100.0)
    model = wrap(module)
    model(x(rank)).sum().backward()
    return grads(module)


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


def local_loss_added_to_the_gradient(wrap, rank, size):
    """A regulariser is differentiated without the wrapper, then the model: its gradient too is
    averaged, or is not.
    """
    module = linear()
    model = wrap(module)
    (module.weight.square().sum() * (rank + 1)).backward()
    model(x(rank)).sum().backward()
    return grads(module)


def infinity_on_one_rank_then_a_good_step(wrap, rank, size):
    module = linear()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        scale = float("inf") if rank == 1 and step == 0 else 1.0
        model(x(rank, scale)).sum().backward()
        if all(p.grad.isfinite().all() for p in module.parameters()):
            optimizer.step()
    return everything(module)


SITUATIONS = [
    row(gradient_set_to_none_on_one_rank),
    row(zeroed_in_place_by_the_optimizer),
    row(zeroed_between_forward_and_backward),
    row(never_zeroed),
    row(some_gradients_zeroed_others_none),
    row(gradient_that_was_there_before_the_wrap),
    row(gradient_of_each_rank_before_the_wrap),
    row(gradient_set_between_forward_and_backward),
    row(local_loss_added_to_the_gradient),
    row(infinity_on_one_rank_then_a_good_step),
]
