"""Parameters that are frozen, thawed or unused; find_unused_parameters and static_graph."""

import torch
from ranks.situations.rows import better, row
from ranks.situations.values import (
    alone,
    batch,
    everything,
    grads,
    linear,
    perceptron,
    sgd,
    square_losses,
    started,
    train,
    trained,
    weights,
    x,
)
from torch import nn


def frozen_before_the_wrap(wrap, rank, size):
    module = perceptron()
    module[0].requires_grad_(False)
    trained(wrap, rank, module, optimizer=sgd(module[2]))
    return everything(module)


def frozen_with_its_gradient_kept(wrap, rank, size):
    module = nn.Sequential(linear(), nn.Linear(1, 1, bias=False))
    nn.init.constant_(module[1].weight, 1.0)
    model = wrap(module, find_unused_parameters=True)
    model(x(rank)).sum().backward()
    module[0].requires_grad_(False)
    model(x(rank)).sum().backward()
    return grads(module)


def toggled_every_step(wrap, rank, size):
    """Body and head are trained in turn."""
    module, model, optimizer = started(wrap, perceptron(), find_unused_parameters=True)
    for step in range(6):
        module[0].requires_grad_(step % 2 == 0)
        module[2].requires_grad_(step % 2 == 1)
        train(model, optimizer, rank, [step])
    return everything(module)


def toggled_between_forward_and_backward(wrap, rank, size):
    """`requires_grad_(False)` after the forward: autograd leaves `.grad` alone."""
    module = linear()
    model = wrap(module)
    loss = model(x(rank)).sum()
    module.requires_grad_(False)
    loss.backward()
    module.requires_grad_(True)
    return grads(module)


def unfrozen_after_the_wrap(wrap, rank, size):
    """torch does not communicate what was frozen at the wrap: its ranks drift apart."""
    module = perceptron()
    module[0].requires_grad_(False)
    model, optimizer = trained(wrap, rank, module, range(2))
    module[0].requires_grad_(True)
    train(model, optimizer, rank, range(2, 4))
    return everything(module)


def unfrozen_and_wrapped_again(wrap, rank, size):
    """The remedy: wrap once more after the set of trained parameters has changed."""
    module = perceptron()
    module[0].requires_grad_(False)
    _, optimizer = trained(wrap, rank, module, range(2))
    module[0].requires_grad_(True)
    train(wrap(module, optimizer), optimizer, rank, range(2, 4))
    return everything(module)


def _unfrozen(rank, size):
    module = perceptron()
    module[0].requires_grad_(False)
    optimizer = sgd(module)
    losses = square_losses(module, size)
    alone(module, optimizer, losses, 2)
    module[0].requires_grad_(True)
    alone(module, optimizer, lambda step: losses(step + 2), 2)
    return weights(module)


def frozen_after_the_wrap_without_find_unused(wrap, rank, size):
    module = perceptron()
    model, optimizer = trained(wrap, rank, module, range(2))
    module[0].requires_grad_(False)
    train(model, optimizer, rank, [5])
    return everything(module)


class Branching(nn.Module):
    """Uses one of its branches, chosen by an argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(5, 2) for _ in range(3)])
        self.shared = nn.Linear(2, 2)

    def forward(self, inputs, which):
        return self.shared(sum(self.branches[k](inputs) for k in which))


def _branches(wrap, rank, which, kind=torch.optim.SGD, **arguments):
    module = Branching()
    optimizer = kind(module.parameters(), lr=0.1)
    model = wrap(module, optimizer, **arguments)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step, rank), which(step)).square().mean().backward()
        optimizer.step()
    return everything(module)


def unused_branch_that_changes_with_adamw(wrap, rank, size):
    """An unused parameter has no gradient, so it is not decayed."""
    kind = torch.optim.AdamW
    return _branches(wrap, rank, lambda step: [step % 3], kind, find_unused_parameters=True)


def unused_branch_of_one_rank(wrap, rank, size):
    """Used by some ranks: a mean over all, unused counts as zero."""
    return _branches(wrap, rank, lambda step: [rank % 2], find_unused_parameters=True)


def unused_branch_with_bucket_views(wrap, rank, size):
    return _branches(
        wrap,
        rank,
        lambda step: [step % 3],
        torch.optim.AdamW,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )


def static_graph_with_an_unused_parameter(wrap, rank, size):
    kind = torch.optim.AdamW
    return _branches(wrap, rank, lambda step: [0], kind, static_graph=True)


def gradient_kept_where_unused(wrap, rank, size):
    """Accumulated without zeroing, used in the first step only: the gradient stays."""
    module = Branching()
    model = wrap(module, find_unused_parameters=True)
    model(batch(0, rank), [0, 1]).square().mean().backward()
    first = grads(module, "first")
    model(batch(1, rank), [0]).square().mean().backward()
    return first | grads(module)


def unused_under_no_sync_used_before(wrap, rank, size):
    """Accumulation where a branch is used in the first micro-batch only."""
    module = Branching()
    model = wrap(module, find_unused_parameters=True)
    with model.no_sync():
        model(batch(0, rank), [0, 1]).square().mean().backward()
    model(batch(1, rank), [0]).square().mean().backward()
    return grads(module)


def _frozen_after(rank, size):
    module = perceptron()
    optimizer = sgd(module)
    losses = square_losses(module, size)
    alone(module, optimizer, losses, 2)
    module[0].requires_grad_(False)
    alone(module, optimizer, lambda _: losses(5), 1)
    return everything(module)


EXCEPTIONS = [
    row(
        toggled_between_forward_and_backward,
        both=better(
            lambda rank, size: toggled_between_forward_and_backward(lambda module: module, rank, 1),
            "torch gives the frozen parameter a gradient of zeros, autograd gives it none",
        ),
    ),
    row(
        unfrozen_after_the_wrap,
        both=better(
            _unfrozen,
            "torch does not communicate what was frozen at the wrap: its ranks drift apart",
        ),
    ),
    row(
        frozen_after_the_wrap_without_find_unused,
        both=better(_frozen_after, "torch leaves that backward local, without a word"),
    ),
]
