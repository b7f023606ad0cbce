"""Inner steps, sharpness, adversarial inputs and weights."""

import contextlib
import os
import unittest.mock

import torch
from ranks.situations.rows import refused, row
from ranks.situations.values import (
    batch,
    everything,
    normalised,
    perceptron,
    sgd,
    weights,
)


def maml_with_functional_call(wrap, rank, size):
    """Inner steps on fast weights, second order; the outer loss through the wrapper."""
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        fast = dict(model.named_parameters())
        for inner in range(2):
            out = torch.func.functional_call(model, fast, (batch(10 * step + inner, rank),))
            slopes = torch.autograd.grad(
                out.square().mean(), list(fast.values()), create_graph=True
            )
            pairs = zip(fast.items(), slopes, strict=True)
            fast = {name: p - 0.1 * g for (name, p), g in pairs}
        out = torch.func.functional_call(model, fast, (batch(10 * step + 5, rank),))
        out.square().mean().backward()
        optimizer.step()
    return everything(module)


def _perturb(module, scale):
    with torch.no_grad():
        moved = []
        for p in module.parameters():
            e = scale * p.grad / (p.grad.norm() + 1e-6)
            p.add_(e)
            moved.append(e)
    return moved


def _sharpness_aware(wrap, rank, first_pass):
    """`first_pass(model)` is the context of the backward that only says where to climb."""
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(3):
        with first_pass(model):
            model(batch(step, rank)).square().mean().backward()
        moved = _perturb(module, 0.05)
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        with torch.no_grad():
            for p, e in zip(module.parameters(), moved, strict=True):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def sharpness_aware_minimisation(wrap, rank, size):
    return _sharpness_aware(wrap, rank, lambda model: contextlib.nullcontext())


def _sharpness_aware_apart(wrap, rank):
    """The paper's own: the first backward under no_sync, so ranks climb apart."""
    apart = _sharpness_aware(wrap, rank, wrap.no_sync)
    # Adding and subtracting leaves each rank its own rounding, in torch as here.
    return {name: (value * 1e4).round() / 1e4 for name, value in apart.items()}


def sharpness_aware_with_a_local_first_pass(wrap, rank, size):
    """At the second forward ranks hold different weights, on purpose."""
    return _sharpness_aware_apart(wrap, rank)


def sharpness_aware_with_a_local_first_pass_unchecked(wrap, rank, size):
    """The remedy that the error names."""
    with unittest.mock.patch.dict(os.environ, BAGUA_CHECK_WEIGHTS_EVERY="0"):
        return _sharpness_aware_apart(wrap, rank)


def adversarial_training(wrap, rank, size):
    """PGD in eval with gradients of inputs, then a training step."""
    module = normalised()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(2):
        model.eval()
        data = batch(step, rank).requires_grad_()
        for _ in range(2):
            model(data).square().mean().backward()
            with torch.no_grad():
                data = (data + 0.1 * data.grad.sign()).requires_grad_()
        model.train()
        optimizer.zero_grad()
        model(data.detach()).square().mean().backward()
        optimizer.step()
    return everything(module)


SITUATIONS = [
    row(maml_with_functional_call),
    row(sharpness_aware_minimisation),
    row(
        sharpness_aware_with_a_local_first_pass,
        both=refused(
            "ranks hold different weights.*BAGUA_CHECK_WEIGHTS_EVERY=0",
            "weights apart on purpose look like weights that drift apart; the check has a switch",
        ),
    ),
    row(sharpness_aware_with_a_local_first_pass_unchecked),
    row(adversarial_training),
]
