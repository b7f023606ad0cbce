"""Averages of weights beside training, and weights that are swapped."""

import torch
from ranks.situations.rows import row
from ranks.situations.values import (
    adam,
    batch,
    everything,
    loop,
    perceptron,
    sgd,
)


def exponential_average_of_weights(wrap, rank, size):
    module = perceptron()
    average = {name: p.detach().clone() for name, p in module.named_parameters()}

    def after(model, step):
        with torch.no_grad():
            for name, p in wrap.inner(model).named_parameters():
                average[name].lerp_(p, 0.1)

    def loss(model, step):
        return model(batch(step, rank)).square().mean()

    return loop(wrap, rank, module, sgd(module), loss, after=after) | {"average": average}


def evaluation_with_averaged_weights_swapped_in(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    average = [p.detach().clone() for p in module.parameters()]
    outputs = []
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average, module.parameters(), strict=True):
                a.lerp_(p, 0.1)
        kept = [p.data for p in module.parameters()]
        for a, p in zip(average, module.parameters(), strict=True):
            p.data = a.clone()
        model.eval()
        with torch.no_grad():
            outputs.append(model(batch(9, 0)).sum())
        model.train()
        for own, p in zip(kept, module.parameters(), strict=True):
            p.data = own
    return everything(module) | {"outputs": torch.stack(outputs)}


def schedule_free_weights_swapped_for_evaluation(wrap, rank, size):
    """Weights are exchanged in place between training and evaluation."""
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    slow = [p.detach().clone() for p in module.parameters()]
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for s, p in zip(slow, module.parameters(), strict=True):
                s.lerp_(p, 0.5)
                fast = p.clone()
                p.copy_(s)
                s.copy_(fast)
        model.eval()
        with torch.no_grad():
            model(batch(9, rank))
        model.train()
        with torch.no_grad():
            for s, p in zip(slow, module.parameters(), strict=True):
                fast = s.clone()
                s.copy_(p)
                p.copy_(fast)
    return everything(module)


def lookahead(wrap, rank, size):
    module = perceptron()
    slow = [p.detach().clone() for p in module.parameters()]

    def after(model, step):
        if step % 2:
            with torch.no_grad():
                for s, p in zip(slow, module.parameters(), strict=True):
                    s.lerp_(p, 0.5)
                    p.copy_(s)

    def loss(model, step):
        return model(batch(step, rank)).square().mean()

    return loop(wrap, rank, module, adam(module), loss, 4, after)


SITUATIONS = [
    row(exponential_average_of_weights),
    row(evaluation_with_averaged_weights_swapped_in),
    row(schedule_free_weights_swapped_for_evaluation),
    row(lookahead),
]
