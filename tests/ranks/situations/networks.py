"""Networks and loops of other kinds."""

import torch
import torch.distributed as dist
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    classes,
    copied,
    everything,
    perceptron,
    sgd,
)
from torch import nn


def _loop(wrap, rank, module, optimizer, loss, steps=3, after=None, **arguments):
    model = wrap(module, optimizer, **arguments)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        losses.append(copied(value))
        if after is not None:
            after(model, step)
    return everything(module) | {"losses": torch.stack(losses)}


def _adam(module, **more):
    return torch.optim.Adam(module.parameters(), lr=0.01, betas=(0.5, 0.99), **more)


def recurrent_network_with_packed_sequences(wrap, rank, size):
    torch.manual_seed(0)
    module = nn.LSTM(5, 4, batch_first=True)

    def loss(model, step):
        data = batch(step, rank, 3, 4, 5)
        lengths = torch.tensor([4, 3 - rank % 2, 1])
        packed = nn.utils.rnn.pack_padded_sequence(data, lengths, batch_first=True)
        return model(packed)[0].data.square().mean()

    return _loop(wrap, rank, module, sgd(module), loss)


def graph_network_with_sums_over_neighbours(wrap, rank, size):
    """Another number of nodes and edges on each rank."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, nodes, edges):
            hidden = torch.relu(self.one(nodes))
            hidden = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
            return self.other(hidden)

    module = Graph()

    def loss(model, step):
        count = 4 + rank
        edges = torch.stack(
            [classes(step, rank, count, 6 + rank), classes(step + 1, rank, count, 6 + rank)]
        )
        return model(batch(step, rank, count, 5), edges).square().mean()

    return _loop(wrap, rank, module, sgd(module), loss)


def curriculum_with_another_number_of_layers(wrap, rank, size):
    """Progressive growing: more layers are used from step to step."""

    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

        def forward(self, inputs, depth):
            for layer in self.layers[:depth]:
                inputs = torch.tanh(layer(inputs))
            return inputs

    module = Growing()

    def loss(model, step):
        return model(batch(step, rank), step + 1).square().mean()

    return _loop(wrap, rank, module, _adam(module), loss, find_unused_parameters=True)


def early_stopping_by_agreement(wrap, rank, size):
    """The end is decided together, by a collective of the user."""
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    steps = 0
    for step in range(10):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        steps += 1
        stop = torch.tensor(float(rank == 0 and step == 3))
        dist.all_reduce(stop)
        if stop:
            break
    return everything(module) | {"steps": steps}


SITUATIONS = [
    row(recurrent_network_with_packed_sequences),
    row(graph_network_with_sums_over_neighbours),
    row(curriculum_with_another_number_of_layers),
    row(early_stopping_by_agreement),
]
