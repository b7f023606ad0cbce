"""Activation checkpointing, reentrant or not."""

import torch
from ranks.situations.recipes import Transformer, _text
from ranks.situations.rows import refused, row
from ranks.situations.values import alone, batch, everything, sgd, square_losses, started
from torch import nn
from torch.utils.checkpoint import checkpoint


def _trained(wrap, module, loss, **arguments):
    module, model, optimizer = started(wrap, module, **arguments)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    return everything(module)


def _transformer(wrap, rank, reentrant):
    def loss(model, step):
        return model(_text(step, rank), _text(step + 1, rank))[0]

    return _trained(wrap, Transformer(checkpointed=reentrant), loss)


def checkpointing_reentrant(wrap, rank, size):
    return _transformer(wrap, rank, True)


def checkpointing_not_reentrant(wrap, rank, size):
    return _transformer(wrap, rank, False)


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


def _shared_layer(wrap, rank, **arguments):
    def loss(model, step):
        return model(batch(step, rank).requires_grad_()).square().mean()

    return _trained(wrap, Twice(True), loss, **arguments)


def a_shared_layer_under_reentrant_checkpoints_with_static_graph(wrap, rank, size):
    return _shared_layer(wrap, rank, static_graph=True)


def a_shared_layer_under_reentrant_checkpoints(wrap, rank, size):
    """Without static_graph torch raises."""
    return _shared_layer(wrap, rank)


EXCEPTIONS = [
    row(
        a_shared_layer_under_reentrant_checkpoints,
        both=refused(
            "received a gradient twice",
            "torch's ranks drift apart; static_graph=True or use_reentrant=False",
            _twice_alone,
        ),
    ),
]
