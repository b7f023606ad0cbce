"""Rounds of islands of which some are late, in plain torch, from the formulas.

A round with the islands C that count, of weights w (samples), and the anchor a:

D   = sum over C of w_i (s(a) - x_i) / n_i / sum of w_i  x_i: at the launch of island i, which has
                                                         trained n_i intervals since it counted last
m  <- mu m + D;   u = D + mu m;   a' = a - eta u
x_i <- x_i + s(a') - x_i of its launch                   for i in C
x_j <- x_j + s(a') - s(a)                                for j not in C, when it hears of the round
"""

import torch
from torch import nn


class Islands:
    def __init__(self, weights, lr, momentum):
        """`weights`: list of tensors with which all begin."""
        self.lr, self.mu = lr, momentum
        self.anchors = [[w.detach().clone() for w in weights]]  # after each round
        self.momenta = [torch.zeros_like(w) for w in self.anchors[0]]

    def round(self, launched, samples, intervals=None):
        """`launched`: for each island that counts its weights at the launch; `intervals`: n_i."""
        shares = torch.tensor(samples, dtype=torch.float64)
        shares /= shares.sum() * torch.tensor(intervals or [1] * len(samples))
        new = []
        for place, anchor in enumerate(self.anchors[-1]):
            deltas = [(anchor - own[place]).double() for own in launched]
            mean = sum(share * delta for share, delta in zip(shares, deltas, strict=True)).float()
            self.momenta[place] = self.mu * self.momenta[place] + mean
            new.append(anchor - self.lr * (mean + self.mu * self.momenta[place]))
        self.anchors.append(new)

    def after(self, round, now, launched):
        """Weights of an island that counted in the last round."""
        anchors = self.anchors[round + 1]
        return [x + a - at for x, a, at in zip(now, anchors, launched, strict=True)]

    def late(self, round, now):
        """Weights of an island that did not."""
        pairs = zip(now, self.anchors[round + 1], self.anchors[round], strict=True)
        return [x + new - old for x, new, old in pairs]


def loss_where_some_count(count, discounts, *, rounds=60, interval=4, overlap=2, rate=0.03):
    """The loss of the last anchor of four islands, of which `count` drawn ones count in a round.

    discounts: changes are divided by n_i; otherwise by 1.
    """
    draw = torch.Generator().manual_seed(0)
    models = [_network() for _ in range(4)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=rate) for model in models]
    islands, launches = Islands(_weights(models[0]), lr=0.7, momentum=0.6), [0] * 4

    def train(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = rate / (1 + number / 15)
            for _ in range(steps):
                optimizer.zero_grad()
                _loss(model, draw, 128).backward()
                optimizer.step()

    for number in range(rounds):
        train(interval - (overlap if number else 0))
        launched, launches = [_weights(model) for model in models], [each + 1 for each in launches]
        train(overlap)
        counted = torch.randperm(4, generator=draw)[:count].sort().values.tolist()
        parts = [launches[island] if discounts else 1 for island in counted]
        islands.round([launched[island] for island in counted], [1] * count, parts)
        for island, model in enumerate(models):
            now = islands.late(number, _weights(model))
            if island in counted:
                now = islands.after(number, _weights(model), launched[island])
                launches[island] = 0
            _set(model, now)
    _set(models[0], islands.anchors[-1])
    with torch.no_grad():
        return _loss(models[0], torch.Generator().manual_seed(1), 4096).item()


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _loss(model, draw, rows):
    """On a noisy function of the inputs, whose floor is 0.25."""
    inputs, noise = (torch.randn(rows, columns, generator=draw) for columns in (8, 1))
    targets = 0.3 * inputs[:, :3].sum(1, keepdim=True) + 0.5 * noise
    return (model(inputs) - targets).square().mean()


def _weights(model):
    return [p.detach().clone() for p in model.parameters()]


def _set(model, weights):
    with torch.no_grad():
        for p, value in zip(model.parameters(), weights, strict=True):
            p.copy_(value)
