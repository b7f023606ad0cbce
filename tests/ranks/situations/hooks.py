"""Hooks on gradients, modules and optimizers, which may step or read."""

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
    started,
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


def post_accumulate_hook_that_reads_before_the_wrap(wrap, rank, size):
    return _read(wrap, rank, _post_accumulate, before=True)


def hook_on_the_accumulation_node_after_the_wrap(wrap, rank, size):
    return _read(wrap, rank, _on_the_node)


def hook_on_the_accumulation_node_before_the_wrap(wrap, rank, size):
    return _read(wrap, rank, _on_the_node, before=True)


def _clip(p):
    p.grad.clamp_(-0.01, 0.01)


def post_accumulate_hook_that_clips(wrap, rank, size):
    module, model, optimizer = started(wrap, perceptron())
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


def full_backward_hook_on_the_model(wrap, rank, size):
    module = perceptron()
    seen = []
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    model.register_full_backward_hook(lambda m, gin, gout: seen.append(gout[0].sum()))
    train(model, optimizer, rank, range(2))
    return everything(module) | {"seen": seen}


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


EXCEPTIONS = [
    row(post_accumulate_hook_that_steps_before_the_wrap, both=_refused(_stepping)),
    row(post_accumulate_hook_that_steps_after_the_wrap, both=_refused(_stepping)),
    row(apply_optimizer_in_backward_before_the_wrap, both=BETTER),
    row(apply_optimizer_in_backward_after_the_wrap, both=BETTER),
    row(hook_on_the_accumulation_node_that_steps, both=_refused(_stepping_nodes)),
    row(
        queue_callback_at_the_end_of_backward,
        both=better(
            lambda rank, size: {"seen": [torch.full((1, 2), (size + 1) / 2)]},
            "at the end of the backward gradients are communicated; torch's callback comes before",
        ),
    ),
]
