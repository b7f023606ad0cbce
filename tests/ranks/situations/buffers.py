"""Buffers: whose values each rank has, and when."""

import contextlib
import random

import torch
from ranks.situations.rows import better, row
from ranks.situations.values import (
    alone,
    batch,
    copied,
    everything,
    linear,
    normalised,
    sgd,
    square_losses,
    started,
    train,
    weights,
    x,
)
from torch import nn


class Stamped(nn.Module):
    """A weight, and a buffer that each rank sets to its own number before a forward."""

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.register_buffer("stamp", torch.zeros(1))
        self.seen = []

    def forward(self, inputs):
        self.seen.append(self.stamp.item())
        return self.layer(inputs)


def _stamped(wrap, rank, **arguments):
    module = Stamped()
    model = wrap(module, **arguments)

    def forward(value):
        with torch.no_grad():
            module.stamp.fill_(value + rank)
        return model(x(rank)).sum()

    return module, model, forward


def _seen(module):
    return {"seen": torch.tensor(module.seen)}


def stamps_of_drawn_scripts(wrap, rank, size):
    """Forwards in train() and eval(), with and without gradients, no_sync() and a backward."""
    draw = random.Random(0)
    result = {}
    for script in range(20):
        module, model, forward = _stamped(wrap, rank)
        for step in range(8):
            model.train(draw.random() < 0.7)
            gradients, forward_syncs, backward_syncs, backward = (
                draw.random() < 0.7 for _ in range(4)
            )
            with torch.set_grad_enabled(gradients), _sync(model, forward_syncs):
                loss = forward(10.0 * step)
            if gradients and backward:
                with _sync(model, backward_syncs):
                    loss.backward()
        result |= {f"seen{script}": module.seen}
    return result


def _sync(model, syncs):
    return contextlib.nullcontext() if syncs else model.no_sync()


def stamps_without_broadcast(wrap, rank, size):
    module, _, forward = _stamped(wrap, rank, broadcast_buffers=False)
    for step in range(3):
        forward(10.0 * step).backward()
    return _seen(module)


def stamps_without_forward_sync(wrap, rank, size):
    module, _, forward = _stamped(wrap, rank, forward_sync_buffers=False)
    for step in range(3):
        forward(10.0 * step).backward()
    return _seen(module)


def _rank_by_rank(rank):
    """A model whose weights, of which some are frozen, and buffers are each rank's own."""
    module = normalised(seed=rank)
    module[3].requires_grad_(False)
    module[1].running_mean.fill_(rank + 1.0)
    return module


def buffers_at_the_wrap(wrap, rank, size):
    return everything(wrap.inner(wrap(_rank_by_rank(rank))))


def buffers_at_the_wrap_without_broadcast(wrap, rank, size):
    """By its documentation with_bagua gives rank 0's buffers to all, whatever the argument."""
    wrap.need_class()
    return everything(wrap.inner(wrap(_rank_by_rank(rank), broadcast_buffers=False)))


def buffer_replaced_by_the_user(wrap, rank, size):
    """`module.stamp = tensor`: the module has another tensor as buffer."""
    module, model, _ = _stamped(wrap, rank)
    for step in range(3):
        module.stamp = torch.full((1,), 10.0 * step + rank)
        model(x(rank)).sum().backward()
    return _seen(module)


def integer_and_boolean_buffers(wrap, rank, size):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()
            self.register_buffer("count", torch.tensor(rank, dtype=torch.int64))
            self.register_buffer("mask", torch.tensor([rank == 0, True]))
            narrow = torch.full((3,), rank + 0.5, dtype=torch.float16)
            self.register_buffer("narrow", narrow, persistent=False)

        def forward(self, inputs):
            self.count += rank + 1
            return self.layer(inputs * self.mask)

    module = Counting()
    model = wrap(module)
    for _ in range(3):
        model(x(rank)).sum().backward()
    return everything(module)


def buffer_of_other_shape_on_each_rank(wrap, rank, size):
    """Only at the wrap are shapes compared; a queue that grows is its own affair without
    broadcast.
    """

    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()
            self.register_buffer("queue", torch.zeros(1, 2))

        def forward(self, inputs):
            self.queue = torch.cat([self.queue, inputs.detach().repeat(rank + 1, 1)])
            return self.layer(inputs)

    module = Queue()
    model = wrap(module, broadcast_buffers=False)
    for _ in range(3):
        model(x(rank)).sum().backward()
    return everything(module)


def ignored_buffer(wrap, rank, size):
    """A buffer that each rank keeps to itself."""
    module = Stamped()
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["stamp"]
    )
    model = wrap(module)
    for step in range(3):
        with torch.no_grad():
            module.stamp.fill_(10.0 * step + rank)
        model(x(rank)).sum().backward()
    return _seen(module)


def batch_norm_evaluation_with_backward(wrap, rank, size):
    """Test-time adaptation: gradients are computed in eval between training steps."""
    module, model, optimizer = started(wrap, normalised())
    means = []
    for step in range(4):
        train(model, optimizer, rank, [step])
        model.eval()
        model(batch(77, rank)).square().mean().backward()
        model.train()
        means.append(copied(module[1].running_mean))
    return everything(module) | {"means": means}


def _one_rank_evaluates(wrap, rank, who):
    """A rank alone evaluates through the wrapper, without gradients, between steps."""
    module, model, optimizer = started(wrap, normalised())
    for step in range(3):
        if step > 0 and rank == who:
            model.eval()
            with torch.no_grad():
                model(batch(9, rank))
                model(batch(10, rank))
            model.train()
        train(model, optimizer, rank, [step])
    return weights(module)


def rank_0_evaluates_between_steps(wrap, rank, size):
    return _one_rank_evaluates(wrap, rank, 0)


def rank_1_evaluates_between_steps(wrap, rank, size):
    return _one_rank_evaluates(wrap, rank, 1)


def _by_all_ranks(rank, size):
    """Batches are normalised apart, as on ranks."""
    module = normalised()
    return weights(alone(module, sgd(module), square_losses(module, size), 3))


ALONE = better(_by_all_ranks, "torch mixes up its collectives, and fails or hangs")


EXCEPTIONS = [
    row(rank_0_evaluates_between_steps, both=ALONE),
    row(rank_1_evaluates_between_steps, both=ALONE),
]
