"""Several wrapped models, tied weights, and models that are used several times."""

import itertools

import torch
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    everything,
    grads,
    perceptron,
    sgd,
    trained,
    weights,
)
from torch import nn


def two_wrapped_parts_of_one_model(wrap, rank, size):
    """Backbone and head wrapped apart, one loss through both."""
    torch.manual_seed(0)
    body, head = nn.Linear(5, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    b, h = wrap(body), wrap(head)
    for step in range(3):
        optimizer.zero_grad()
        h(torch.tanh(b(batch(step, rank)))).square().mean().backward()
        optimizer.step()
    return everything(body, "body.") | everything(head, "head.")


def two_models_backward_in_other_order_than_forward(wrap, rank, size):
    one, other = perceptron(0), perceptron(1)
    a, b = wrap(one), wrap(other)
    first, second = a(batch(0, rank)), b(batch(0, rank))
    second.square().mean().backward()
    first.square().mean().backward()
    return grads(one, "one") | grads(other, "other")


class Tied(nn.Module):
    """A decoder with the encoder's weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(5, 4, bias=False)
        self.decoder = nn.Linear(4, 5, bias=False)
        self.decoder.weight = nn.Parameter(self.encoder.weight.t().detach().clone())
        self.again = nn.Linear(5, 4, bias=False)
        self.again.weight = self.encoder.weight

    def forward(self, inputs):
        return self.again(self.decoder(torch.tanh(self.encoder(inputs))))


def tied_weights(wrap, rank, size):
    module = Tied()
    model, _ = trained(wrap, rank, module)
    tied = model.module if hasattr(model, "module") else model
    return everything(module) | {"tied": tied.again.weight is tied.encoder.weight}


def the_same_layer_twice_in_a_forward(wrap, rank, size):
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    module = nn.Sequential(layer, nn.Tanh(), layer)
    trained(wrap, rank, module)
    return everything(module)


def recurrent_use_of_the_model(wrap, rank, size):
    """Back-propagation through time over calls of the wrapper."""
    torch.manual_seed(0)
    module = nn.Linear(5, 5)
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        hidden = batch(step, rank)
        for _ in range(3):
            hidden = torch.tanh(model(hidden))
        hidden.square().mean().backward()
        optimizer.step()
    return everything(module)


def one_optimizer_over_two_wrapped_models(wrap, rank, size):
    one, other = perceptron(0), perceptron(1)
    optimizer = torch.optim.Adam(itertools.chain(one.parameters(), other.parameters()), lr=0.01)
    a, b = wrap(one, optimizer), wrap(other)
    for step in range(3):
        optimizer.zero_grad()
        a(batch(step, rank)).square().mean().backward()
        b(batch(step, rank)).square().mean().backward()
        optimizer.step()
    return weights(one, "one") | weights(other, "other")


SITUATIONS = [
    row(two_wrapped_parts_of_one_model),
    row(two_models_backward_in_other_order_than_forward),
    row(tied_weights),
    row(the_same_layer_twice_in_a_forward),
    row(recurrent_use_of_the_model),
    row(one_optimizer_over_two_wrapped_models),
]
