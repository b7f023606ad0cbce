"""Autocast and gradient scaling."""

import torch
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    everything,
    perceptron,
    sgd,
    weights,
)
from torch import nn


def autocast_with_a_gradient_scaler(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(step, rank)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return everything(module) | {"scale": scaler.get_scale()}


def gradient_scaler_with_an_overflow_on_one_rank(wrap, rank, size):
    """All ranks skip the step, because the mean is infinite on all."""
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).square().mean()
        if step == 1 and rank == size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(module) | {"scale": scaler.get_scale()}


SITUATIONS = [
    row(autocast_with_a_gradient_scaler),
    row(gradient_scaler_with_an_overflow_on_one_rank),
]
