"""Parameters that some or all ranks do not use; find_unused_parameters and static_graph."""

import torch
from ranks.situations.rows import ONLY_CLASS, better, row
from ranks.situations.values import (
    alone,
    batch,
    everything,
    grads,
    perceptron,
    sgd,
    square_losses,
    train,
    trained,
)
from torch import nn


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


def static_graph_without_unused(wrap, rank, size):
    return _branches(wrap, rank, lambda step: [0, 1, 2], static_graph=True)


def find_unused_with_nothing_unused(wrap, rank, size):
    return _branches(wrap, rank, lambda step: [0, 1, 2], find_unused_parameters=True)


def unused_output(wrap, rank, size):
    """One of two outputs enters the loss."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(5, 2), nn.Linear(5, 2)

        def forward(self, inputs):
            return self.one(inputs), self.other(inputs)

    module = Two()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model = wrap(module, optimizer, find_unused_parameters=True)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank))[step % 2].square().mean().backward()
        optimizer.step()
    return everything(module)


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
    with wrap.no_sync(model):
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


SITUATIONS = [
    row(
        frozen_after_the_wrap_without_find_unused,
        both=better(_frozen_after, "torch leaves that backward local, without a word"),
    ),
    row(unused_branch_that_changes_with_adamw),
    row(unused_branch_of_one_rank),
    row(unused_branch_with_bucket_views),
    row(static_graph_with_an_unused_parameter, method=ONLY_CLASS),
    row(static_graph_without_unused, method=ONLY_CLASS),
    row(find_unused_with_nothing_unused),
    row(unused_output),
    row(gradient_kept_where_unused),
    row(unused_under_no_sync_used_before),
]
