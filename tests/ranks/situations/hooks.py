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
    train,
    x,
)


def _stepping(module):
    """A hook that applies SGD and frees the gradient as soon as it is there."""

    def hook(p):
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(hook)


def _optimizer_per_parameter(module):
    """The tutorial's way to save memory: an optimizer for each parameter, in its hook."""
    optimizers = {p: torch.optim.Adam([p], lr=0.01, foreach=False) for p in module.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(hook)


def _in_backward(module):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})


def _node(p):
    """The node that accumulates the gradient of a parameter."""
    return p.view_as(p).grad_fn.next_functions[0][0]


def _stepping_nodes(module):
    """Apex's and old fused optimizers: the step is in the node's hook. Returns the nodes."""

    def stepping(p):
        def hook(*_):
            with torch.no_grad():
                p.sub_(0.1 * p.grad)
            p.grad = None

        return hook

    nodes = [_node(p) for p in module.parameters()]
    for node, p in zip(nodes, module.parameters(), strict=True):
        node.register_hook(stepping(p))
    return nodes


def _stepped(wrap, rank, register, before=False):
    """A perceptron whose hooks step, registered before the wrap or after it."""
    module = perceptron()
    held = register(module) if before else None
    model = wrap(module)
    held = held if before else register(module)
    for step in range(3):
        model(batch(step, rank)).square().mean().backward()
    return everything(module)


def post_accumulate_hook_that_steps_before_the_wrap(wrap, rank, size):
    return _stepped(wrap, rank, _stepping, before=True)


def post_accumulate_hook_that_steps_after_the_wrap(wrap, rank, size):
    return _stepped(wrap, rank, _stepping)


def optimizer_per_parameter_after_the_wrap(wrap, rank, size):
    return _stepped(wrap, rank, _optimizer_per_parameter)


def apply_optimizer_in_backward_before_the_wrap(wrap, rank, size):
    return _stepped(wrap, rank, _in_backward, before=True)


def apply_optimizer_in_backward_after_the_wrap(wrap, rank, size):
    return _stepped(wrap, rank, _in_backward)


def hook_on_the_accumulation_node_that_steps(wrap, rank, size):
    return _stepped(wrap, rank, _stepping_nodes)


def _post_accumulate(weight, look):
    return weight.register_post_accumulate_grad_hook(look)


def _on_the_node(weight, look):
    node = _node(weight)
    node.register_hook(look)
    return node


def _read(wrap, rank, register, before=False):
    """A weight whose hook, registered before the wrap or after it, records its gradient."""
    module, seen = linear(), []

    def look(*_):
        seen.append(copied(module.weight.grad))

    held = register(module.weight, look) if before else None
    model = wrap(module)
    held = held if before else register(module.weight, look)
    for _ in range(2):
        module.zero_grad()
        model(x(rank)).sum().backward()
    return grads(module) | {"seen": seen}


def post_accumulate_hook_that_reads(wrap, rank, size):
    return _read(wrap, rank, _post_accumulate)


def post_accumulate_hook_that_reads_before_the_wrap(wrap, rank, size):
    return _read(wrap, rank, _post_accumulate, before=True)


def post_accumulate_hook_under_no_sync(wrap, rank, size):
    seen = []
    module = linear()
    model = wrap(module)
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(copied(p.grad)))
    with wrap.no_sync(model):
        model(x(rank)).sum().backward()
    model(x(rank)).sum().backward()
    return grads(module) | {"seen": seen}


def hook_on_the_accumulation_node_after_the_wrap(wrap, rank, size):
    return _read(wrap, rank, _on_the_node)


def hook_on_the_accumulation_node_before_the_wrap(wrap, rank, size):
    return _read(wrap, rank, _on_the_node, before=True)


def _clip(p):
    p.grad.clamp_(-0.01, 0.01)


def post_accumulate_hook_that_clips(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(_clip)
    train(model, optimizer, rank)
    return everything(module)


def _by_hooks(register):
    """The oracle of a perceptron whose hooks step."""

    def oracle(rank, size):
        module = perceptron()
        held = register(module)  # noqa: F841 - nodes live as long as somebody has them
        alone(module, None, square_losses(module, size), 3)
        return everything(module)

    return oracle


def _refused(register):
    return refused(
        "was changed while backward ran",
        "torch runs the hook before it communicates: its ranks drift apart",
        _by_hooks(register),
    )


BETTER = better(_by_hooks(_in_backward), "torch needs an accelerator for it")

SITUATIONS = [
    row(post_accumulate_hook_that_steps_before_the_wrap, both=_refused(_stepping)),
    row(post_accumulate_hook_that_steps_after_the_wrap, both=_refused(_stepping)),
    row(optimizer_per_parameter_after_the_wrap, both=_refused(_optimizer_per_parameter)),
    row(apply_optimizer_in_backward_before_the_wrap, both=BETTER),
    row(apply_optimizer_in_backward_after_the_wrap, both=BETTER),
    row(post_accumulate_hook_that_reads),
    row(post_accumulate_hook_that_reads_before_the_wrap),
    row(post_accumulate_hook_under_no_sync),
    row(post_accumulate_hook_that_clips),
    row(hook_on_the_accumulation_node_after_the_wrap),
    row(hook_on_the_accumulation_node_before_the_wrap),
    row(hook_on_the_accumulation_node_that_steps, both=_refused(_stepping_nodes)),
]
