"""torch's optimizers, closures, several at once."""

import torch
import torch.distributed as dist
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    everything,
    perceptron,
    weights,
)


def lbfgs(wrap, rank, size):
    """A closure that is called several times a step; all ranks see the same loss."""
    module = perceptron().double()
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4)
    model = wrap(module, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(batch(0, rank).double()).square().mean()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / size

    for _ in range(2):
        optimizer.step(closure)
    return everything(module)


def two_optimizers_over_one_model(wrap, rank, size):
    """Matrices by one optimizer, vectors by another."""
    module = perceptron()
    matrices = torch.optim.SGD([p for p in module.parameters() if p.dim() > 1], lr=0.1)
    vectors = torch.optim.Adam([p for p in module.parameters() if p.dim() == 1], lr=0.01)
    model = wrap(module, [matrices, vectors])
    for step in range(3):
        for optimizer in (matrices, vectors):
            optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        for optimizer in (matrices, vectors):
            optimizer.step()
    return everything(module)


def foreach_and_fused_optimizers(wrap, rank, size):
    result = {}
    for name in ("foreach", "fused"):
        module = perceptron()
        optimizer = torch.optim.AdamW(module.parameters(), 0.01, **{name: True})
        model = wrap(module, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
        result |= weights(module, name)
    return result


SITUATIONS = [
    row(lbfgs),
    row(two_optimizers_over_one_model),
    row(foreach_and_fused_optimizers),
]
