"""Backwards and optimizer steps inside the wrapped module's forward, as Lightning's manual ones."""

import contextlib

import torch
from ranks.situations.rows import better, refused, row
from ranks.situations.values import batch, everything, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint


class Gan(nn.Module):
    """A generator and a discriminator whose training steps are one forward: `train_on(self)`."""

    def __init__(self, train_on):
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))
        self.d = nn.Sequential(nn.Linear(5, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1))
        self.optimizers = sgd(self.g), sgd(self.d)
        self._train_on = train_on

    def forward(self, inputs):
        return self._train_on(self, inputs)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def toggle(self, g, d):
        self.g.requires_grad_(g)
        self.d.requires_grad_(d)

    def losses(self, inputs):
        """Of all data in `inputs`, a list: the mean over ranks where it has those of all."""
        g = sum(self.d(self.g(noise)).mean().neg() for noise in inputs) / len(inputs)
        d = [self.d(self.g(noise).detach()).mean() - self.d(1 - noise).mean() for noise in inputs]
        return g, sum(d) / len(inputs)


def toggled(gan, inputs):
    for number, optimizer in enumerate(gan.optimizers):
        gan.toggle(g=number == 0, d=number == 1)
        loss = gan.losses(inputs)[number]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gan.toggle(g=True, d=True)


def untoggled(gan, inputs):
    for number, optimizer in enumerate(gan.optimizers):
        loss = gan.losses(inputs)[number]
        gan.zero_grad()
        loss.backward()
        optimizer.step()


def _first_inside(gan, inputs):
    """The discriminator trains inside, both by the loss that is returned."""
    gan.zero_grad()
    gan.losses(inputs)[1].backward()
    gan.optimizers[1].step()
    gan.zero_grad()
    return gan.losses(inputs)[0]


def _penalised(gan, inputs):
    """A penalty's torch.autograd.grad inside the forward is not a backward."""
    gan.zero_grad()
    penalties = []
    for noise in inputs:
        real = noise.clone().requires_grad_()
        (slope,) = torch.autograd.grad(gan.d(real).sum(), real, create_graph=True)
        penalties.append((slope.norm(dim=1) - 1).square().mean())
    return sum(penalties) / len(penalties) + sum(gan.losses(inputs))


def _checkpointed(which):
    """Steps by the generator's loss, one of the two networks under a reentrant checkpoint."""

    def train_on(gan, inputs):
        def call(network, data):
            if network is getattr(gan, which):
                return checkpoint(network, data, use_reentrant=True)
            return network(data)

        gan.zero_grad()
        losses = [call(gan.d, call(gan.g, noise.requires_grad_())).mean() for noise in inputs]
        (sum(losses) / len(losses)).backward()
        gan.step()

    return train_on


def _trained(gan, model, data):
    for step in range(3):
        returned = model(data(step))
        if returned is not None:
            returned.backward()
            gan.step()
    return everything(gan)


def _on_ranks(wrap, rank, train_on):
    gan = Gan(train_on)
    model = wrap(gan, gan.optimizers, find_unused_parameters=True)
    return _trained(gan, model, lambda step: [batch(step, rank)])


def _alone(train_on):
    """The oracle: one process trains on the data of all ranks."""

    def oracle(rank, size):
        gan = Gan(train_on)
        return _trained(gan, gan, lambda step: [batch(step, r) for r in range(size)])

    return oracle


def gan_with_toggled_optimizers(wrap, rank, size):
    """Each optimizer's step with the other network frozen, both inside one forward."""
    return _on_ranks(wrap, rank, toggled)


def gan_with_two_backwards(wrap, rank, size):
    return _on_ranks(wrap, rank, untoggled)


def one_backward_inside_and_one_of_what_is_returned(wrap, rank, size):
    return _on_ranks(wrap, rank, _first_inside)


def gradients_of_inputs_inside(wrap, rank, size):
    return _on_ranks(wrap, rank, _penalised)


def a_backward_that_ends_in_a_reentrant_checkpoint_inside(wrap, rank, size):
    return _on_ranks(wrap, rank, _checkpointed("g"))


def a_backward_that_begins_in_a_reentrant_checkpoint_inside(wrap, rank, size):
    return _on_ranks(wrap, rank, _checkpointed("d"))


def _accumulated(gan, model, no_sync, data):
    """no_sync() around the forward around the backward."""
    for step in range(2):
        gan.zero_grad()
        with no_sync():
            model(data(10 + step))
        model(data(step))
        gan.step()
    return everything(gan)


def _backward(gan, inputs):
    sum(gan.losses(inputs)).backward()


def a_backward_inside_that_is_accumulated(wrap, rank, size):
    gan = Gan(_backward)
    model = wrap(gan, gan.optimizers)
    return _accumulated(gan, model, model.no_sync, lambda step: [batch(step, rank)])


def _accumulated_alone(rank, size):
    gan = Gan(_backward)
    everyone = range(size)
    return _accumulated(
        gan, gan, contextlib.nullcontext, lambda step: [batch(step, r) for r in everyone]
    )


def a_backward_after_a_forward_that_failed(wrap, rank, size):
    """An exception leaves a forward; the next step is a plain one."""

    def forward(gan, inputs):
        if inputs is None:
            raise KeyError("no data")
        return sum(gan.losses(inputs))

    gan = Gan(forward)
    model = wrap(gan, gan.optimizers)
    kept = model([batch(0, rank)])
    for step in range(2):
        try:
            model(None)
        except KeyError:
            gan.zero_grad()
        (kept if step == 0 else model([batch(step, rank)])).backward()
        gan.step()
    return everything(gan)


LOCAL = "torch communicates no backward inside of a forward, or raises"

EXCEPTIONS = [
    row(gan_with_toggled_optimizers, both=better(_alone(toggled), LOCAL)),
    row(gan_with_two_backwards, both=better(_alone(untoggled), LOCAL)),
    row(one_backward_inside_and_one_of_what_is_returned, both=better(_alone(_first_inside), LOCAL)),
    row(a_backward_inside_that_is_accumulated, both=better(_accumulated_alone, LOCAL)),
    row(
        a_backward_that_ends_in_a_reentrant_checkpoint_inside,
        both=better(_alone(_checkpointed("g")), LOCAL),
    ),
    row(
        a_backward_that_begins_in_a_reentrant_checkpoint_inside,
        both=refused(
            "use_reentrant=False",
            "torch's ranks drift apart; use_reentrant=False, or backward after the forward",
            _alone(_checkpointed("d")),
        ),
    ),
]
