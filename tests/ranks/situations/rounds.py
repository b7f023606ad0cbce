"""Which backward is communicated: no_sync, accumulation, evaluation, several forwards."""

import contextlib
import random

import torch
from ranks.situations.rows import better, row
from ranks.situations.values import (
    batch,
    copied,
    everything,
    grads,
    linear,
    perceptron,
    sgd,
    started,
    train,
    weights,
    x,
)
from torch import nn


def _drawn(seed):
    """Forwards, backwards of any forward before, and zeroes, each in no_sync() or not."""
    draw = random.Random(seed)
    forwards = 0
    for _ in range(12):
        what = draw.choice(["forward", "backward", "zero"]) if forwards else "forward"
        forwards += what == "forward"
        yield what, draw.random() < 0.7, draw.randrange(forwards)


def drawn_forwards_and_backwards(wrap, rank, size):
    result = {}
    for seed in range(20):
        module, outputs = linear(), []
        model = wrap(module)
        for step, (what, syncs, number) in enumerate(_drawn(seed)):
            with contextlib.nullcontext() if syncs else model.no_sync():
                if what == "forward":
                    outputs.append(model(x(rank, step + 1.0)).sum())
                elif what == "zero":
                    module.zero_grad()
                else:
                    outputs[number].backward(retain_graph=True)
                    result[f"seed{seed}.step{step}"] = copied(module.weight.grad)
    return result


def _drawn_alone(rank, size):
    """A mean over ranks after each backward of a forward outside no_sync(), and after one of any
    forward where the last one was outside and had none yet."""
    result = {}
    for seed in range(20):
        gradients, forwards, due = [0.0] * size, [], False
        for step, (what, syncs, number) in enumerate(_drawn(seed)):
            if what == "forward":
                forwards.append((step + 1.0, syncs))
                due = syncs
            elif what == "zero":
                gradients = [0.0] * size
            else:
                scale, synced = forwards[number]
                gradients = [g + scale * (r + 1) for r, g in enumerate(gradients)]
                if synced or due:
                    gradients = [sum(gradients) / size] * size
                    due = False
                result[f"seed{seed}.step{step}"] = torch.full((1, 2), gradients[rank])
    return result


def two_forwards_one_backward(wrap, rank, size):
    module = linear()
    model = wrap(module)
    (model(x(rank)) + model(x(rank, 10.0))).sum().backward()
    return grads(module)


def accumulation_with_no_sync(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module, momentum=0.9)
    model = wrap(module, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            for micro in range(3):
                (model(batch(10 * step + micro, rank)).square().mean() / 4).backward()
        (model(batch(10 * step + 3, rank)).square().mean() / 4).backward()
        optimizer.step()
    return everything(wrap.inner(model))


def accumulation_without_no_sync(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module, momentum=0.9)
    model = wrap(module, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(4):
            (model(batch(10 * step + micro, rank)).square().mean() / 4).backward()
        optimizer.step()
    return everything(wrap.inner(model))


def accumulation_with_the_attribute(wrap, rank, size):
    """As nanoGPT, Lightning and fairseq do it: require_backward_grad_sync is set."""
    module = linear()
    model = wrap(module)
    model.require_backward_grad_sync = False
    model(x(rank)).sum().backward()
    model.require_backward_grad_sync = True
    model(x(rank, 10.0)).sum().backward()
    return grads(module)


def eval_backward(wrap, rank, size):
    module = linear()
    model = wrap(module)
    model.eval()
    model(x(rank)).sum().backward()
    return grads(module)


def validation_of_one_rank_of_the_inner_module_with_grad(wrap, rank, size):
    module, model, optimizer = started(wrap, perceptron())
    for step in range(3):
        train(model, optimizer, rank, [step])
        if rank == 0:
            model.eval()
            model(batch(step + 50, rank))
            model.train()
    return everything(module)


def inference_mode_between_steps(wrap, rank, size):
    module, model, optimizer = started(wrap, perceptron())
    losses = []
    for step in range(3):
        train(model, optimizer, rank, [step])
        with torch.inference_mode():
            losses.append(model(batch(9, 0)).sum())
    return weights(module) | {"losses": torch.stack(losses)}


def enable_grad_inside_no_grad(wrap, rank, size):
    """Attacks and test-time training enable gradients inside an evaluation."""
    module = linear()
    model = wrap(module)
    model.eval()
    with torch.no_grad():
        model(x(rank, 9.0))
        with torch.enable_grad():
            model(x(rank)).sum().backward()
    return grads(module)


def autograd_grad_of_parameters(wrap, rank, size):
    """torch.autograd.grad gives this rank's own gradients, and no .grad."""
    module = linear()
    model = wrap(module)
    own = torch.autograd.grad(model(x(rank)).sum(), list(module.parameters()))
    before = grads(module, "before")
    model(x(rank)).sum().backward()
    return grads(module) | before | {"own": own[0]}


def backward_with_inputs(wrap, rank, size):
    """backward(inputs=...) reaches one parameter of two."""
    module = nn.Sequential(linear(2.0), nn.Linear(1, 1, bias=False))
    nn.init.constant_(module[1].weight, 3.0)
    model = wrap(module, find_unused_parameters=True)
    own = wrap.inner(model)
    model(x(rank)).sum().backward(inputs=[own[0].weight, own[1].weight])
    return grads(own)


ONLY_THE_FIRST = "torch communicates only the first backward after a forward: its ranks drift apart"

EXCEPTIONS = [row(drawn_forwards_and_backwards, both=better(_drawn_alone, ONLY_THE_FIRST))]
