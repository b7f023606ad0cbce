"""Training with asynchronous averaging, in steps: what its tests share."""

import time

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import AsyncModelAverageAlgorithm
from support import training


def wrapped(model=None, interval_ms=1, warmup_steps=0, lr=0.05, **options):
    model = training.network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    chosen = AsyncModelAverageAlgorithm(sync_interval_ms=interval_ms, warmup_steps=warmup_steps)
    return model.with_bagua([optimizer], chosen, **options), optimizer


def step(model, optimizer, number=0):
    training.train(model, optimizer, [training.batch(number, dist.get_rank())])


def averages(model):
    return model.bagua_stats()["rounds"]


def train_until(model, optimizer, count, seconds=20.0):
    """Steps of its own number until `count` averages have been applied; the number of steps."""
    end, steps = time.monotonic() + seconds, 0
    while averages(model) < count:
        assert time.monotonic() < end, f"{averages(model)} of {count} averages in {seconds} s"
        step(model, optimizer, steps)
        steps += 1
    return steps


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
