"""Decentralized SGD of all ranks in one process, from the formulas and nothing else.

    x_r <- mean of x over r's peers (every `interval` steps), then
    x_r <- x_r - optimizer's update with the gradient at x_r before averaging

Nothing here calls the library. Weights are lists over ranks of lists over parameters.
"""

import torch


def shift_one_pairs(size, communication):
    """The peer of every rank; its own number for the rank that sits out (odd sizes)."""
    if size % 2 == 1:
        return [(communication - rank) % size for rank in range(size)]
    half = size // 2
    low = [(communication + rank) % half + half for rank in range(half)]
    return low + [(rank - half - communication) % half for rank in range(half, size)]


def average(weights, mode, communication, nodes=None):
    """Every rank's weights after the communication with that number, from 0.

    nodes: the node of every rank, for hierarchical averaging: the exact mean inside, `mode` between
    nodes, each with the weight of its ranks. Default: every rank is a node.
    """
    nodes = list(range(len(weights))) if nodes is None else nodes
    order = sorted(set(nodes), key=nodes.index)
    members = [[rank for rank, node in enumerate(nodes) if node == wanted] for wanted in order]
    pairs = shift_one_pairs(len(order), communication)
    result = [None] * len(weights)
    for node, own in enumerate(members):
        if mode == "all":
            peers = range(len(weights))
        else:
            peers = own if pairs[node] == node else own + members[pairs[node]]
        for rank in own:
            parameters = zip(*(weights[peer] for peer in peers), strict=True)
            result[rank] = [mean(values) for values in parameters]
    return result


def mean(values):
    """The mean in f64, rounded once: for two f32 values it is (a + b) / 2 to the bit."""
    return torch.stack([value.double() for value in values]).mean(0).to(values[0].dtype)


class Ranks:
    """n ranks that train: `models[rank]` after every `step`."""

    def __init__(self, models, make_optimizer, mode, interval=1, nodes=None):
        self.models = models
        self.optimizers = [make_optimizer(model) for model in models]
        self.mode = mode
        self.interval = interval
        self.nodes = nodes
        self.iterations = 0
        self.communications = 0

    def step(self, loss, batches):
        """One iteration: `batches[rank]` is what the rank sees."""
        weights = [[p.detach().clone() for p in model.parameters()] for model in self.models]
        if self.iterations % self.interval == 0:
            weights = average(weights, self.mode, self.communications, self.nodes)
            self.communications += 1
        self.iterations += 1
        for model, optimizer, batch, averaged in zip(
            self.models, self.optimizers, batches, weights, strict=True
        ):
            optimizer.zero_grad()
            loss(model, batch).backward()
            with torch.no_grad():
                for p, value in zip(model.parameters(), averaged, strict=True):
                    p.copy_(value)
            optimizer.step()
