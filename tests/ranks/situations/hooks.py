"""Hooks that run when a gradient is accumulated, and that step or read."""

import torch
from ranks.situations.rows import better, refused, row
from ranks.situations.values import (
    alone,
    batch,
    copied,
    everything,
    grads,
    linear,
    perceptron,
    sgd,
    square_losses,
    weights,
    x,
)


def _stepping(module, lr=0.1):
    """A hook that applies SGD and frees the gradient as soon as it is there."""

    def hook(p):
        with torch.no_grad():
            p -= lr * p.grad
        p.grad = None

    return [p.register_post_accumulate_grad_hook(hook) for p in module.parameters()]


def post_accumulate_hook_that_steps_before_the_wrap(wrap, rank, size):
    module = linear()
    _stepping(module)
    model = wrap(module)
    for _ in range(3):
        model(x(rank)).sum().backward()
    return everything(module)


def post_accumulate_hook_that_steps_after_the_wrap(wrap, rank, size):
    module = linear()
    model = wrap(module)
    _stepping(module)
    for _ in range(3):
        model(x(rank)).sum().backward()
    return everything(module)


def _optimizer_per_parameter(module):
    """The tutorial's way to save memory: an optimizer for each parameter, in its hook."""
    optimizers = {p: torch.optim.Adam([p], lr=0.01, foreach=False) for p in module.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(hook)


def optimizer_per_parameter_after_the_wrap(wrap, rank, size):
    module = perceptron()
    model = wrap(module)
    _optimizer_per_parameter(module)
    for step in range(3):
        model(batch(step, rank)).square().mean().backward()
    return everything(module)


def _in_backward(module):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})


def apply_optimizer_in_backward_before_the_wrap(wrap, rank, size):
    module = perceptron()
    _in_backward(module)
    model = wrap(module)
    for step in range(3):
        model(batch(step, rank)).square().mean().backward()
    return everything(module)


def apply_optimizer_in_backward_after_the_wrap(wrap, rank, size):
    module = perceptron()
    model = wrap(module)
    _in_backward(module)
    for step in range(3):
        model(batch(step, rank)).square().mean().backward()
    return everything(module)


def post_accumulate_hook_that_reads(wrap, rank, size):
    seen = []
    module = linear()
    model = wrap(module)
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(copied(p.grad)))
    for _ in range(2):
        module.zero_grad()
        model(x(rank)).sum().backward()
    return grads(module) | {"seen": seen}


def post_accumulate_hook_that_reads_before_the_wrap(wrap, rank, size):
    seen = []
    module = linear()
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(copied(p.grad)))
    model = wrap(module)
    for _ in range(2):
        module.zero_grad()
        model(x(rank)).sum().backward()
    return grads(module) | {"seen": seen}


def post_accumulate_hook_under_no_sync(wrap, rank, size):
    seen = []
    module = linear()
    model = wrap(module)
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(copied(p.grad)))
    with wrap.no_sync(model):
        model(x(rank)).sum().backward()
    model(x(rank)).sum().backward()
    return grads(module) | {"seen": seen}


def _clip(p):
    p.grad.clamp_(-0.01, 0.01)


def post_accumulate_hook_that_clips(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(_clip)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return everything(module)


def _node(p):
    """The node that accumulates the gradient of a parameter."""
    return p.view_as(p).grad_fn.next_functions[0][0]


def hook_on_the_accumulation_node_after_the_wrap(wrap, rank, size):
    seen = []
    module = linear()
    model = wrap(module)
    node = _node(module.weight)
    node.register_hook(lambda *_: seen.append(copied(module.weight.grad)))
    for _ in range(2):
        module.zero_grad()
        model(x(rank)).sum().backward()
    return grads(module) | {"seen": seen}


def hook_on_the_accumulation_node_before_the_wrap(wrap, rank, size):
    seen = []
    module = linear()
    node = _node(module.weight)
    node.register_hook(lambda *_: seen.append(copied(module.weight.grad)))
    model = wrap(module)
    for _ in range(2):
        module.zero_grad()
        model(x(rank)).sum().backward()
    return grads(module) | {"seen": seen}


def hook_on_the_accumulation_node_that_steps(wrap, rank, size):
    """Apex's and old fused optimizers: the step is in the node's hook, after the wrap."""
    module = linear()
    model = wrap(module)
    node = _node(module.weight)

    def hook(*_):
        with torch.no_grad():
            module.weight -= 0.1 * module.weight.grad
        module.weight.grad = None

    node.register_hook(hook)
    for _ in range(3):
        model(x(rank)).sum().backward()
    return everything(module)


def _by_hooks(register):
    """The oracle of a perceptron whose hooks step."""

    def oracle(rank, size):
        module = perceptron()
        register(module)
        alone(module, None, square_losses(module, size), 3)
        return everything(module)

    return oracle


IN_BACKWARD = "torch runs the hook before it communicates: its ranks drift apart"


def _stepped_linear(rank, size):
    module = linear()
    _stepping(module)
    alone(module, None, lambda _: [module(x(r)).sum() for r in range(size)], 3)
    return weights(module)


def _steps(oracle):
    return refused("was changed while backward ran", IN_BACKWARD, oracle)


SITUATIONS = [
    row(post_accumulate_hook_that_steps_before_the_wrap, both=_steps(_stepped_linear)),
    row(post_accumulate_hook_that_steps_after_the_wrap, both=_steps(_stepped_linear)),
    row(optimizer_per_parameter_after_the_wrap, both=_steps(_by_hooks(_optimizer_per_parameter))),
    row(
        apply_optimizer_in_backward_before_the_wrap,
        both=better(_by_hooks(_in_backward), "torch needs an accelerator for it"),
    ),
    row(
        apply_optimizer_in_backward_after_the_wrap,
        both=better(_by_hooks(_in_backward), "torch needs an accelerator for it"),
    ),
    row(post_accumulate_hook_that_reads),
    row(post_accumulate_hook_that_reads_before_the_wrap),
    row(post_accumulate_hook_under_no_sync),
    row(post_accumulate_hook_that_clips),
    row(hook_on_the_accumulation_node_after_the_wrap),
    row(hook_on_the_accumulation_node_before_the_wrap),
    row(hook_on_the_accumulation_node_that_steps, both=_steps(_stepped_linear)),
]
