"""Backwards and optimizer steps inside the wrapped module's forward, as Lightning's manual ones."""

import torch
from ranks.situations.rows import better, refused, row
from ranks.situations.values import (
    batch,
    everything,
    sgd,
)
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


def _summed(gan, inputs):
    """Two backwards of one graph add up before the steps."""
    gan.zero_grad()
    g, d = gan.losses(inputs)
    (g + d).backward(retain_graph=True)
    g.backward()
    for optimizer in gan.optimizers:
        optimizer.step()


def _one(gan, inputs):
    gan.zero_grad()
    sum(gan.losses(inputs)).backward()
    for optimizer in gan.optimizers:
        optimizer.step()


def _first_inside(gan, inputs):
    """The discriminator trains inside, the generator by the loss that is returned."""
    _, discriminator = gan.optimizers
    gan.zero_grad()
    gan.losses(inputs)[1].backward()
    discriminator.step()
    gan.zero_grad()
    return gan.losses(inputs)[0]


def _gan(train_on):
    """The situation in which `train_on` is the forward, and what is right."""

    def run(wrap, rank, size):
        gan = Gan(train_on)
        model = wrap(gan, gan.optimizers, find_unused_parameters=True)
        for step in range(3):
            _finish(gan, model([batch(step, rank)]))
        return everything(gan)

    def right(rank, size):
        gan = Gan(train_on)
        for step in range(3):
            _finish(gan, gan([batch(step, r) for r in range(size)]))
        return everything(gan)

    return run, right


def _finish(gan, returned):
    if returned is not None:
        returned.backward()
        gan.optimizers[0].step()


def gan_with_toggled_optimizers(wrap, rank, size):
    """Each optimizer's step with the other network frozen, both inside one forward."""
    return _gan(toggled)[0](wrap, rank, size)


def gan_with_two_backwards(wrap, rank, size):
    return _gan(untoggled)[0](wrap, rank, size)


def two_backwards_of_one_graph(wrap, rank, size):
    return _gan(_summed)[0](wrap, rank, size)


def one_backward(wrap, rank, size):
    return _gan(_one)[0](wrap, rank, size)


def one_backward_inside_and_one_of_what_is_returned(wrap, rank, size):
    return _gan(_first_inside)[0](wrap, rank, size)


def a_backward_inside_that_is_accumulated(wrap, rank, size):
    """no_sync() around the forward around the backward."""
    gan = Gan(_accumulated)
    model = wrap(gan, gan.optimizers)
    for step in range(2):
        gan.zero_grad()
        with wrap.no_sync(model):
            model([batch(10 + step, rank)])
        model([batch(step, rank)])
        for optimizer in gan.optimizers:
            optimizer.step()
    return everything(gan)


def _accumulated(gan, inputs):
    sum(gan.losses(inputs)).backward()


def _accumulated_alone(rank, size):
    gan = Gan(_accumulated)
    for step in range(2):
        gan.zero_grad()
        for data in (10 + step, step):
            gan([batch(data, r) for r in range(size)])
        for optimizer in gan.optimizers:
            optimizer.step()
    return everything(gan)


def gradients_of_inputs_inside(wrap, rank, size):
    """A penalty's torch.autograd.grad inside the forward is no backward."""

    def forward(gan, inputs):
        (noise,) = inputs
        real = noise.clone().requires_grad_()
        (slope,) = torch.autograd.grad(gan.d(real).sum(), real, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean() + sum(gan.losses(inputs))

    gan = Gan(forward)
    model = wrap(gan, gan.optimizers)
    for step in range(2):
        gan.zero_grad()
        model([batch(step, rank)]).backward()
        for optimizer in gan.optimizers:
            optimizer.step()
    return everything(gan)


def _through(gan, noise, checkpointed, use_reentrant=True):
    """The loss of the generator, one of the two networks under a checkpoint."""

    def call(network, inputs):
        if network is getattr(gan, checkpointed):
            return checkpoint(network, inputs, use_reentrant=use_reentrant)
        return network(inputs)

    return call(gan.d, call(gan.g, noise.requires_grad_())).mean()


def _checkpointed_steps(wrap, rank, *arguments):
    def forward(gan, inputs):
        gan.zero_grad()
        _through(gan, *inputs, *arguments).backward()
        for optimizer in gan.optimizers:
            optimizer.step()

    gan = Gan(forward)
    model = wrap(gan, gan.optimizers)
    for step in range(2):
        model([batch(step, rank)])
    return everything(gan)


def _checkpointed_alone(rank, size):
    gan = Gan(None)
    for step in range(2):
        gan.zero_grad()
        losses = [gan.d(gan.g(batch(step, r))).mean() for r in range(size)]
        (sum(losses) / size).backward()
        for optimizer in gan.optimizers:
            optimizer.step()
    return everything(gan)


def a_backward_through_a_checkpoint_inside(wrap, rank, size):
    return _checkpointed_steps(wrap, rank, "d", False)


def a_backward_that_ends_in_a_reentrant_checkpoint_inside(wrap, rank, size):
    return _checkpointed_steps(wrap, rank, "g")


def a_backward_that_begins_in_a_reentrant_checkpoint_inside(wrap, rank, size):
    return _checkpointed_steps(wrap, rank, "d")


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
        for optimizer in gan.optimizers:
            optimizer.step()
    return everything(gan)


LOCAL = "torch communicates no backward inside of a forward, or raises"


SITUATIONS = [
    row(gan_with_toggled_optimizers, both=better(_gan(toggled)[1], LOCAL)),
    row(gan_with_two_backwards, both=better(_gan(untoggled)[1], LOCAL)),
    row(two_backwards_of_one_graph, both=better(_gan(_summed)[1], LOCAL)),
    row(one_backward, both=better(_gan(_one)[1], LOCAL)),
    row(
        one_backward_inside_and_one_of_what_is_returned,
        both=better(_gan(_first_inside)[1], LOCAL),
    ),
    row(a_backward_inside_that_is_accumulated, both=better(_accumulated_alone, LOCAL)),
    row(gradients_of_inputs_inside),
    row(a_backward_through_a_checkpoint_inside, both=better(_checkpointed_alone, LOCAL)),
    row(
        a_backward_that_ends_in_a_reentrant_checkpoint_inside,
        both=better(_checkpointed_alone, LOCAL),
    ),
    row(
        a_backward_that_begins_in_a_reentrant_checkpoint_inside,
        both=refused(
            "use_reentrant=False",
            "torch's ranks drift apart; use_reentrant=False, or backward after the forward",
            _checkpointed_alone,
        ),
    ),
    row(a_backward_after_a_forward_that_failed),
]
