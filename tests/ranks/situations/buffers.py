"""Buffers: whose values each rank has, and when."""

import torch
from ranks.situations.rows import ONLY_CLASS, row
from ranks.situations.values import (
    everything,
    linear,
    normalised,
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


def stamps_of_forwards_without_backward(wrap, rank, size):
    module, _, forward = _stamped(wrap, rank)
    for step in range(3):
        forward(10.0 * step)
    forward(30.0).backward()
    return _seen(module)


def stamps_in_eval(wrap, rank, size):
    """An evaluation with gradients, a training step, evaluations with and without."""
    module, model, forward = _stamped(wrap, rank)
    model.eval()
    forward(10.0)
    model.train()
    forward(20.0).backward()
    model.eval()
    forward(30.0)
    with torch.no_grad():
        forward(40.0)
        forward(50.0)
    forward(60.0)
    forward(70.0)
    return _seen(module)


def stamps_of_no_grad_after_training(wrap, rank, size):
    """The first forward after a communicating one gives rank 0's buffers, without gradients too."""
    module, _model, forward = _stamped(wrap, rank)
    forward(10.0).backward()
    with torch.no_grad():
        forward(20.0)
        forward(30.0)
    forward(40.0).backward()
    forward(50.0).backward()
    return _seen(module)


def stamps_of_a_first_forward_without_grad(wrap, rank, size):
    module, _model, forward = _stamped(wrap, rank)
    with torch.no_grad():
        forward(10.0)
        forward(20.0)
    forward(30.0).backward()
    forward(40.0).backward()
    return _seen(module)


def stamps_under_accumulation(wrap, rank, size):
    module, model, forward = _stamped(wrap, rank)
    for step in range(2):
        with wrap.no_sync(model):
            forward(100.0 * step + 10.0).backward()
            forward(100.0 * step + 20.0).backward()
        forward(100.0 * step + 30.0).backward()
    return _seen(module)


def stamps_of_a_first_forward_under_no_sync(wrap, rank, size):
    module, model, forward = _stamped(wrap, rank)
    with wrap.no_sync(model):
        forward(10.0).backward()
    forward(20.0).backward()
    forward(30.0).backward()
    return _seen(module)


def stamps_of_no_sync_around_the_backward(wrap, rank, size):
    module, model, forward = _stamped(wrap, rank)
    loss = forward(10.0)
    with wrap.no_sync(model):
        loss.backward()
        forward(20.0)
    forward(30.0).backward()
    return _seen(module)


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


def buffers_of_several_forwards(wrap, rank, size):
    """Two forwards with broadcast, without batch norm's versions in the graph."""
    module, _model, forward = _stamped(wrap, rank)
    for step in range(2):
        (forward(10.0 * step) + forward(10.0 * step + 5.0)).backward()
    return _seen(module)


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
            self.register_buffer("narrow", torch.full((3,), rank + 0.5, dtype=torch.float16))

        def forward(self, inputs):
            self.count += rank + 1
            return self.layer(inputs * self.mask)

    module = Counting()
    model = wrap(module)
    for _ in range(3):
        model(x(rank)).sum().backward()
    return everything(module)


def buffer_that_is_not_persistent(wrap, rank, size):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()
            self.register_buffer("offset", torch.full((1,), float(rank)), persistent=False)

        def forward(self, inputs):
            return self.layer(inputs) + self.offset

    module = Hidden()
    model = wrap(module)
    output = model(x(0)).sum()
    output.backward()
    return everything(module) | {"output": output}


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


def ignored_buffer_by_our_name(wrap, rank, size):
    """Both names of the list, so that every house finds its own."""
    module = Stamped()
    module._ddp_params_and_buffers_to_ignore = ["stamp"]
    module._bagua_params_and_buffers_to_ignore = ["stamp"]
    model = wrap(module)
    for step in range(3):
        with torch.no_grad():
            module.stamp.fill_(10.0 * step + rank)
        model(x(rank)).sum().backward()
    return _seen(module)


SITUATIONS = [
    row(stamps_of_forwards_without_backward),
    row(stamps_in_eval),
    row(stamps_of_no_grad_after_training),
    row(stamps_of_a_first_forward_without_grad),
    row(stamps_under_accumulation),
    row(stamps_of_a_first_forward_under_no_sync),
    row(stamps_of_no_sync_around_the_backward),
    row(stamps_without_broadcast),
    row(stamps_without_forward_sync),
    row(buffers_at_the_wrap),
    row(buffers_at_the_wrap_without_broadcast, method=ONLY_CLASS),
    row(buffers_of_several_forwards),
    row(buffer_replaced_by_the_user),
    row(integer_and_boolean_buffers),
    row(buffer_that_is_not_persistent),
    row(buffer_of_other_shape_on_each_rank),
    row(ignored_buffer),
    row(ignored_buffer_by_our_name),
]
