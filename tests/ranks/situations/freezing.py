"""Parameters that are frozen and thawed after the wrap."""

import torch
from ranks.situations.rows import better, row
from ranks.situations.values import (
    alone,
    batch,
    everything,
    grads,
    linear,
    perceptron,
    sgd,
    square_losses,
    train,
    trained,
    weights,
    x,
)
from torch import nn


def frozen_before_the_wrap(wrap, rank, size):
    module = perceptron()
    module[0].requires_grad_(False)
    trained(wrap, rank, module, optimizer=sgd(module[2]))
    return everything(module)


def frozen_after_the_wrap(wrap, rank, size):
    """A frozen parameter counts as unused, on all ranks."""
    module = perceptron()
    model, optimizer = trained(wrap, rank, module, range(2), find_unused_parameters=True)
    module[0].requires_grad_(False)
    train(model, optimizer, rank, range(2, 4))
    return everything(module)


def frozen_with_its_gradient_kept(wrap, rank, size):
    module = nn.Sequential(linear(), nn.Linear(1, 1, bias=False))
    nn.init.constant_(module[1].weight, 1.0)
    model = wrap(module, find_unused_parameters=True)
    model(x(rank)).sum().backward()
    module[0].requires_grad_(False)
    model(x(rank)).sum().backward()
    return grads(module)


def toggled_every_step(wrap, rank, size):
    """Body and head are trained in turn."""
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer, find_unused_parameters=True)
    for step in range(6):
        module[0].requires_grad_(step % 2 == 0)
        module[2].requires_grad_(step % 2 == 1)
        train(model, optimizer, rank, [step])
    return everything(module)


def toggled_between_forward_and_backward(wrap, rank, size):
    """`requires_grad_(False)` after the forward: autograd leaves `.grad` alone."""
    module = linear()
    model = wrap(module)
    loss = model(x(rank)).sum()
    module.requires_grad_(False)
    loss.backward()
    module.requires_grad_(True)
    return grads(module)


def _generator_and_discriminator():
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    d = nn.Sequential(nn.Linear(5, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1))
    return g, d


def gan_with_both_frozen_in_turn(wrap, rank, size):
    """StyleGAN2: `requires_grad(generator, False)` while D trains, and the other way round."""
    g, d = _generator_and_discriminator()
    go, do = sgd(g), sgd(d)
    generator, discriminator = wrap(g, go), wrap(d, do)
    for step in range(3):
        g.requires_grad_(False)
        d.requires_grad_(True)
        do.zero_grad()
        fake = generator(batch(step, rank, 4, 3))
        real = discriminator(batch(step + 10, rank))
        (discriminator(fake).mean() - real.mean()).backward()
        do.step()
        g.requires_grad_(True)
        d.requires_grad_(False)
        go.zero_grad()
        discriminator(generator(batch(step + 20, rank, 4, 3))).mean().backward()
        go.step()
    return everything(g, "g.") | everything(d, "d.")


def gan_whose_discriminator_gathers_gradients_of_the_generator(wrap, rank, size):
    """DCGAN: D is not frozen, its gradients are zeroed before its own step."""
    g, d = _generator_and_discriminator()
    go, do = sgd(g), sgd(d)
    generator, discriminator = wrap(g, go), wrap(d, do)
    for step in range(3):
        do.zero_grad()
        discriminator(batch(step + 10, rank)).mean().neg().backward()
        fake = generator(batch(step, rank, 4, 3))
        discriminator(fake.detach()).mean().backward()
        do.step()
        go.zero_grad()
        discriminator(fake).mean().neg().backward()
        go.step()
    return everything(g, "g.") | everything(d, "d.")


def unfrozen_after_the_wrap(wrap, rank, size):
    """torch does not communicate what was frozen at the wrap: its ranks drift apart."""
    module = perceptron()
    module[0].requires_grad_(False)
    model, optimizer = trained(wrap, rank, module, range(2))
    module[0].requires_grad_(True)
    train(model, optimizer, rank, range(2, 4))
    return everything(module)


def unfrozen_and_wrapped_again(wrap, rank, size):
    """The remedy: wrap once more after the set of trained parameters has changed."""
    module = perceptron()
    module[0].requires_grad_(False)
    _, optimizer = trained(wrap, rank, module, range(2))
    module[0].requires_grad_(True)
    train(wrap(module, optimizer), optimizer, rank, range(2, 4))
    return everything(module)


def _unfrozen(rank, size):
    module = perceptron()
    module[0].requires_grad_(False)
    optimizer = sgd(module)
    losses = square_losses(module, size)
    alone(module, optimizer, losses, 2)
    module[0].requires_grad_(True)
    alone(module, optimizer, lambda step: losses(step + 2), 2)
    return weights(module)


SITUATIONS = [
    row(frozen_before_the_wrap),
    row(frozen_after_the_wrap),
    row(frozen_with_its_gradient_kept),
    row(toggled_every_step),
    row(
        toggled_between_forward_and_backward,
        both=better(
            lambda rank, size: toggled_between_forward_and_backward(lambda module: module, rank, 1),
            "torch gives the frozen parameter a gradient of zeros, autograd gives it none",
        ),
    ),
    row(gan_with_both_frozen_in_turn),
    row(gan_whose_discriminator_gathers_gradients_of_the_generator),
    row(
        unfrozen_after_the_wrap,
        both=better(
            _unfrozen,
            "torch does not communicate what was frozen at the wrap: its ranks drift apart",
        ),
    ),
    row(unfrozen_and_wrapped_again),
]
