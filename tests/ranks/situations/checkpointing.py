"""Activation checkpointing, reentrant or not."""

import torch
from ranks.situations.language import Transformer, _text
from ranks.situations.rows import ONLY_CLASS, refused, row
from ranks.situations.values import (
    alone,
    batch,
    everything,
    loop,
    sgd,
    square_losses,
)
from torch import nn
from torch.utils.checkpoint import checkpoint


def _checkpointed(wrap, rank, reentrant, **arguments):
    module = Transformer(checkpointed=reentrant)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def loss(model, step):
        return model(_text(step, rank), _text(step + 1, rank))[0]

    return loop(wrap, rank, module, optimizer, loss, **arguments)


def checkpointing_reentrant(wrap, rank, size):
    return _checkpointed(wrap, rank, True)


def checkpointing_not_reentrant(wrap, rank, size):
    return _checkpointed(wrap, rank, False)


def checkpointing_reentrant_with_static_graph(wrap, rank, size):
    return _checkpointed(wrap, rank, True, static_graph=True)


class Twice(nn.Module):
    """One layer in two checkpoints: its gradient comes in two parts."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 2)
        self.reentrant = reentrant

    def forward(self, inputs):
        hidden = inputs
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=self.reentrant)
            hidden = torch.tanh(hidden)
        return self.head(hidden)


def _twice_alone(rank, size):
    module = Twice(False)
    alone(module, sgd(module), square_losses(module, size), 3)
    return everything(module)


def _shared_under_checkpoints(wrap, rank, reentrant, **arguments):
    module = Twice(reentrant)

    def loss(model, step):
        return model(batch(step, rank).requires_grad_()).square().mean()

    return loop(wrap, rank, module, sgd(module), loss, **arguments)


def a_shared_layer_under_reentrant_checkpoints_with_static_graph(wrap, rank, size):
    return _shared_under_checkpoints(wrap, rank, True, static_graph=True)


def a_shared_layer_under_reentrant_checkpoints(wrap, rank, size):
    """Without static_graph torch raises."""
    return _shared_under_checkpoints(wrap, rank, True)


def a_shared_layer_under_checkpoints_not_reentrant(wrap, rank, size):
    return _shared_under_checkpoints(wrap, rank, False)


SITUATIONS = [
    row(checkpointing_reentrant),
    row(checkpointing_not_reentrant),
    row(checkpointing_reentrant_with_static_graph, method=ONLY_CLASS),
    row(a_shared_layer_under_reentrant_checkpoints_with_static_graph, method=ONLY_CLASS),
    row(
        a_shared_layer_under_reentrant_checkpoints,
        both=refused(
            "received a gradient twice",
            "torch's ranks drift apart; static_graph=True or use_reentrant=False",
            _twice_alone,
        ),
    ),
    row(a_shared_layer_under_checkpoints_not_reentrant),
]
