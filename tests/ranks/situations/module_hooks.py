"""Hooks on gradients, modules and optimizers."""

import torch
from ranks.situations.rows import better, row
from ranks.situations.values import (
    batch,
    copied,
    everything,
    grads,
    linear,
    mean,
    perceptron,
    sgd,
    train,
    weights,
    x,
)


def tensor_hook_that_scales(wrap, rank, size):
    """A hook on the parameter sees and changes this rank's own gradient."""
    module = linear()
    model = wrap(module)
    seen = []

    def hook(g):
        seen.append(copied(g))
        return g * 2

    module.weight.register_hook(hook)
    model(x(rank)).sum().backward()
    return grads(module) | {"seen": seen}


def tensor_hook_before_the_wrap(wrap, rank, size):
    module = linear()
    module.weight.register_hook(lambda g: g * 2)
    model = wrap(module)
    model(x(rank)).sum().backward()
    return grads(module)


def full_backward_hook_on_the_model(wrap, rank, size):
    module = perceptron()
    seen = []
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    model.register_full_backward_hook(lambda m, gin, gout: seen.append(gout[0].sum()))
    train(model, optimizer, rank, range(2))
    return everything(module) | {"seen": seen}


def forward_hook_that_replaces_the_output(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    model.register_forward_hook(lambda m, args, out: out * 2)
    train(model, optimizer, rank, range(2))
    return everything(module)


def forward_hook_registered_before_the_wrap(wrap, rank, size):
    module = perceptron()
    module.register_forward_hook(lambda m, args, out: {"out": out * 2, "raw": out})
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(step, rank))["out"].square().mean().backward()
        optimizer.step()
    return everything(module)


def optimizer_step_hooks(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(sum(p.grad.sum() for p in module.parameters()))
    )
    train(model, optimizer, rank, range(2))
    return weights(module) | {"seen": seen}


def multi_grad_hook(wrap, rank, size):
    """torch.autograd.graph.register_multi_grad_hook over all parameters."""
    module = perceptron()
    model = wrap(module)
    seen = []
    torch.autograd.graph.register_multi_grad_hook(
        list(module.parameters()), lambda gs: seen.append(torch.stack([g.sum() for g in gs]))
    )
    model(batch(0, rank)).square().mean().backward()
    return grads(module) | {"seen": seen}


def saved_tensors_on_cpu(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            model(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return everything(module)


def queue_callback_at_the_end_of_backward(wrap, rank, size):
    """FSDP-like and offloading code queues a callback: by then gradients are communicated."""
    module = linear()
    model = wrap(module)
    seen = []

    def hook(g):
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: seen.append(copied(module.weight.grad))
        )
        return g

    module.weight.register_hook(hook)
    model(x(rank)).sum().backward()
    return grads(module) | {"seen": seen}


SITUATIONS = [
    row(tensor_hook_that_scales),
    row(tensor_hook_before_the_wrap),
    row(full_backward_hook_on_the_model),
    row(forward_hook_that_replaces_the_output),
    row(forward_hook_registered_before_the_wrap),
    row(optimizer_step_hooks),
    row(multi_grad_hook),
    row(saved_tensors_on_cpu),
    row(
        queue_callback_at_the_end_of_backward,
        both=better(
            lambda rank, size: {"seen": [torch.full((1, 2), mean(size))]},
            "at the end of the backward gradients are communicated; torch's callback comes before",
        ),
    ),
]
