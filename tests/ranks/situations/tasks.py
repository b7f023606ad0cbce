"""Several tasks or losses, and teachers inside of the model."""

import torch
import torch.distributed as dist
from ranks.situations.networks import _loop
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    perceptron,
    sgd,
    weights,
)
from torch import nn
from torch.nn import functional


def _tasks(wrap, rank, combine):
    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.trunk = nn.Linear(5, 4)
            self.heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(2)])

        def forward(self, inputs):
            hidden = torch.tanh(self.trunk(inputs))
            return [head(hidden) for head in self.heads]

    module = Tasks()
    optimizer = sgd(module)
    model = wrap(module, optimizer, find_unused_parameters=True)
    for step in range(3):
        combine(model, module, optimizer, step)
        optimizer.step()
    return weights(module)


def pcgrad(wrap, rank, size):
    """A forward and backward per task; conflicting gradients are projected."""

    def combine(model, module, optimizer, step):
        per_task = []
        for task in range(2):
            optimizer.zero_grad()
            model(batch(step, rank))[task].sub(task).square().mean().backward()
            per_task.append([p.grad for p in module.trunk.parameters()])
        one, other = per_task
        for p, a, b in zip(module.trunk.parameters(), one, other, strict=True):
            dot = (a * b).sum()
            p.grad = a + b - (dot / b.square().sum() * b if dot < 0 else 0)

    return _tasks(wrap, rank, combine)


def losses_balanced_by_gradient_norms(wrap, rank, size):
    """GradNorm-like: gradients of the shared layer by torch.autograd.grad before the backward."""

    def combine(model, module, optimizer, step):
        optimizer.zero_grad()
        losses = [out.square().mean() for out in model(batch(step, rank))]
        norms = []
        for loss in losses:
            (g,) = torch.autograd.grad(loss, module.trunk.weight, retain_graph=True)
            norm = g.norm()
            dist.all_reduce(norm)
            norms.append(norm)
        sum(loss / norm for loss, norm in zip(losses, norms, strict=True)).backward()

    return _tasks(wrap, rank, combine)


def uncertainty_weighting(wrap, rank, size):
    """Weights of losses are parameters of the wrapped module, used in the loss outside of it."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = perceptron()
            self.logs = nn.Parameter(torch.zeros(2))

        def forward(self, inputs):
            return self.net(inputs)

    module = Weighted()

    def loss(model, step):
        out = model(batch(step, rank))
        parts = torch.stack([out.square().mean(), out.abs().mean()])
        return (parts * (-module.logs).exp() + module.logs).sum()

    return _loop(wrap, rank, module, sgd(module), loss)


def distillation(wrap, rank, size):
    """A frozen teacher inside the wrapped module."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = perceptron(0)
            self.teacher = perceptron(1).requires_grad_(False).eval()

        def forward(self, inputs):
            with torch.no_grad():
                target = self.teacher(inputs)
            return self.student(inputs), target

    module = Pair()

    def loss(model, step):
        out, target = model(batch(step, rank))
        return functional.kl_div(out.log_softmax(1), target.softmax(1), reduction="batchmean")

    return _loop(wrap, rank, module, sgd(module.student), loss)


SITUATIONS = [
    row(pcgrad),
    row(losses_balanced_by_gradient_norms),
    row(uncertainty_weighting),
    row(distillation),
]
