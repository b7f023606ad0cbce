"""Adversarial training of generators, and penalties."""

import torch
from ranks.situations.rows import row
from ranks.situations.values import (
    adam,
    batch,
    everything,
    weights,
)
from torch import nn


def _gan():
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
    d = nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1))
    return g, d


def wgan_gp(wrap, rank, size):
    """The penalty differentiates the gradient of the wrapped critic."""
    g, d = _gan()
    go, do = adam(g), adam(d)
    generator, critic = wrap(g, go), wrap(d, do)
    for step in range(3):
        do.zero_grad()
        real = batch(step, rank, 4, 5)
        with torch.no_grad():
            fake = generator(batch(step + 10, rank, 4, 3))
        mixed = (real + fake).div(2).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        do.step()
        if step % 2 == 1:
            go.zero_grad()
            (-critic(generator(batch(step + 20, rank, 4, 3))).mean()).backward()
            go.step()
    return weights(g, "g") | weights(d, "d")


def cycle_gan(wrap, rank, size):
    """Two generators in one loss with frozen discriminators, then the discriminators."""
    torch.manual_seed(0)
    ab, ba, da, db = (nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1), nn.Linear(5, 1))
    go = torch.optim.Adam([*ab.parameters(), *ba.parameters()], lr=0.01)
    do = torch.optim.Adam([*da.parameters(), *db.parameters()], lr=0.01)
    to_b, to_a = wrap(ab), wrap(ba)
    of_a, of_b = wrap(da), wrap(db)
    for step in range(3):
        a, b = batch(step, rank), batch(step + 10, rank)
        fake_b, fake_a = to_b(a), to_a(b)
        again_a, again_b = to_a(fake_b), to_b(fake_a)
        for d in (da, db):
            d.requires_grad_(False)
        go.zero_grad()
        cycle = (again_a - a).abs().mean() + (again_b - b).abs().mean()
        (of_a(fake_a).square().mean() + of_b(fake_b).square().mean() + cycle).backward()
        go.step()
        for d in (da, db):
            d.requires_grad_(True)
        do.zero_grad()
        for d, real, fake in ((of_a, a, fake_a), (of_b, b, fake_b)):
            one = (d(real) - 1).square().mean() + d(fake.detach()).square().mean()
            one.backward()
        do.step()
    return {"ab": weights(ab), "ba": weights(ba), "da": weights(da), "db": weights(db)}


def gan_in_one_module(wrap, rank, size):
    """Generator and discriminator under one wrapper; each step uses a part."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.g, self.d = _gan()

        def forward(self, noise, real, which):
            fake = self.g(noise)
            if which == "g":
                return -self.d(fake).mean()
            return self.d(fake.detach()).mean() - self.d(real).mean()

    module = Both()
    go, do = adam(module.g), adam(module.d)
    model = wrap(module, find_unused_parameters=True)
    for step in range(3):
        for which, optimizer in (("d", do), ("g", go)):
            optimizer.zero_grad()
            model(batch(step, rank, 4, 3), batch(step + 10, rank), which).backward()
            optimizer.step()
    return everything(module)


SITUATIONS = [
    row(wgan_gp),
    row(cycle_gan),
    row(gan_in_one_module),
]
