"""Contrastive learning, teachers and queues."""

import copy
import warnings

import torch
import torch.distributed as dist
from ranks.situations.networks import _loop
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    classes,
    everything,
    normalised,
    perceptron,
    sgd,
    weights,
)
from torch import nn
from torch.nn import functional


def simclr(wrap, rank, size):
    """Features of all ranks are gathered without gradients; this rank's replace its own."""
    module = normalised()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        data = torch.cat([batch(step, rank), batch(step + 10, rank)])
        own = functional.normalize(model(data), dim=1)
        everyone = [torch.zeros_like(own) for _ in range(size)]
        dist.all_gather(everyone, own.detach())
        everyone[rank] = own
        features = torch.cat(everyone)
        logits = features @ features.t() - 9 * torch.eye(len(features))
        labels = torch.arange(len(features)).roll(4)
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()
    return everything(module)


def simclr_with_differentiable_gather(wrap, rank, size):
    from torch.distributed.nn.functional import all_gather

    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        own = functional.normalize(model(batch(step, rank)), dim=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            features = torch.cat(all_gather(own))
            functional.cross_entropy(own @ features.t(), classes(step, rank)).backward()
        optimizer.step()
    return everything(module)


def byol(wrap, rank, size):
    """A momentum teacher inside the wrapped module, updated in the forward."""

    class Byol(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = normalised()
            self.teacher = copy.deepcopy(self.online).requires_grad_(False)
            self.predictor = nn.Linear(3, 3)

        def forward(self, one, other):
            with torch.no_grad():
                pairs = zip(self.teacher.parameters(), self.online.parameters(), strict=True)
                for old, new in pairs:
                    old.mul_(0.9).add_(new, alpha=0.1)
                target = self.teacher(other)
            return (self.predictor(self.online(one)) - target).square().mean()

    module = Byol()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)

    def loss(model, step):
        return model(batch(step, rank), batch(step + 10, rank))

    return _loop(wrap, rank, module, optimizer, loss)


def moco(wrap, rank, size):
    """A queue of keys in a buffer, which takes the keys of all ranks."""

    class Moco(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = perceptron()
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            torch.manual_seed(1)
            self.register_buffer("queue", functional.normalize(torch.randn(3, 24), dim=0))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        def forward(self, one, other):
            q = functional.normalize(self.query(one), dim=1)
            with torch.no_grad():
                for old, new in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
                k = functional.normalize(self.key(other), dim=1)
            positive = (q * k).sum(1, keepdim=True)
            logits = torch.cat([positive, q @ self.queue.clone().detach()], 1) / 0.2
            with torch.no_grad():
                keys = [torch.zeros_like(k) for _ in range(size)]
                dist.all_gather(keys, k)
                keys = torch.cat(keys)
                at = int(self.pointer)
                self.queue[:, at : at + len(keys)] = keys.t()[:, : 24 - at]
                self.pointer[0] = (at + len(keys)) % 24
            return functional.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))

    module = Moco()
    optimizer = torch.optim.SGD(module.query.parameters(), lr=0.1)

    def loss(model, step):
        return model(batch(step, rank), batch(step + 10, rank))

    return _loop(wrap, rank, module, optimizer, loss)


def mean_teacher(wrap, rank, size):
    """A copy outside of the wrapper is the teacher."""
    student = normalised()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = sgd(student)

    def loss(model, step):
        with torch.no_grad():
            target = teacher(batch(step, rank))
        return (model(batch(step, rank)) - target + 0.1).square().mean()

    def after(model, step):
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.1)

    return _loop(wrap, rank, student, optimizer, loss, after=after) | weights(teacher, "teacher")


def dino(wrap, rank, size):
    """A centre of teacher outputs averaged over ranks; the last layer is frozen at first."""
    student = perceptron()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = sgd(student)
    centre = torch.zeros(3)

    model = wrap(student, optimizer)
    for step in range(3):
        with torch.no_grad():
            target = teacher(batch(step, rank))
        soft = functional.softmax((target - centre) / 0.1, 1)
        optimizer.zero_grad()
        log = functional.log_softmax(model(batch(step + 10, rank)) / 0.5, 1)
        (-(soft * log).sum(1).mean()).backward()
        if step == 0:
            for p in student[2].parameters():
                p.grad = None
        optimizer.step()
        with torch.no_grad():
            total = target.sum(0)
            dist.all_reduce(total)
            centre.mul_(0.9).add_(total / (4 * size), alpha=0.1)
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.1)
    return everything(student) | {"centre": centre}


SITUATIONS = [
    row(simclr),
    row(simclr_with_differentiable_gather),
    row(byol),
    row(moco),
    row(mean_teacher),
    row(dino),
]
