"""Uneven inputs: join() of the class, alone and with others."""

import torch
from ranks.situations.freezing import Branching
from ranks.situations.rows import better, row
from ranks.situations.values import (
    alone,
    batch,
    everything,
    grads,
    linear,
    normalised,
    perceptron,
    sgd,
    started,
    train,
    weights,
    x,
)
from torch.distributed.algorithms.join import Join


def _uneven(wrap, rank, inputs=None, **arguments):
    """The weights after a join, to which each rank brings `inputs`, or one more than the last."""
    module, model, optimizer = started(wrap, linear())
    with wrap.join(model, **arguments):
        for step in range(2 + rank if inputs is None else inputs):
            optimizer.zero_grad()
            model(x(rank, step + 1.0)).sum().backward()
            optimizer.step()
    return weights(module)


def join_divided_by_all_ranks(wrap, rank, size):
    return _uneven(wrap, rank)


def join_divided_by_those_left(wrap, rank, size):
    return _uneven(wrap, rank, divide_by_initial_world_size=False)


def join_that_throws_early(wrap, rank, size):
    try:
        _uneven(wrap, rank, throw_on_early_termination=True)
    except RuntimeError as error:
        return {"told": "exhausted" in str(error)}
    return {"told": None}


def zero_grad_after_the_step_in_a_join(wrap, rank, size):
    """Two epochs: what was left in `.grad` of ranks that were through does not enter the next."""
    module, model, optimizer = started(wrap, linear())
    result = {}
    for epoch in range(2):
        with wrap.join(model):
            for step in range(2 + rank):
                model(x(rank, step + 1.0)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        result |= grads(module, f"left{epoch}") | weights(module, f"weight{epoch}")
    model(x(rank)).sum().backward()
    return result | grads(module)


def gradient_of_a_rank_that_is_through(wrap, rank, size):
    """Its `.grad` is that of its own last step."""
    module = linear()
    model = wrap(module)
    with wrap.join(model):
        for step in range(1 + rank):
            module.zero_grad()
            model(x(rank, step + 1.0)).sum().backward()
    return grads(module)


def _with_batch_norm(wrap, rank, **arguments):
    module, model, optimizer = started(wrap, normalised(), **arguments)
    with wrap.join(model):
        train(model, optimizer, rank, range(2 + rank))
    return everything(module)


def join_with_batch_norm(wrap, rank, size):
    return _with_batch_norm(wrap, rank)


def join_with_many_buckets_of_views(wrap, rank, size):
    return _with_batch_norm(wrap, rank, gradient_as_bucket_view=True, bucket_cap_mb=0.0001)


def join_with_unused_parameters(wrap, rank, size):
    """A rank that is through does not know which were used."""
    module, model, optimizer = started(wrap, Branching(), find_unused_parameters=True)
    with wrap.join(model):
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(batch(step, rank), [0]).square().mean().backward()
            optimizer.step()
    return everything(module)


def join_with_no_sync_inside(wrap, rank, size):
    """Accumulation in a join. Every rank has whole groups of micro-batches."""
    module, model, optimizer = started(wrap, linear())
    with wrap.join(model):
        for step in range(2 + rank):
            optimizer.zero_grad()
            with model.no_sync():
                model(x(rank, step + 1.0)).sum().backward()
            model(x(rank, 10.0)).sum().backward()
            optimizer.step()
    return weights(module)


def join_of_two_epochs(wrap, rank, size):
    module, model, optimizer = started(wrap, perceptron())
    for epoch in range(2):
        first, more = 10 * epoch, rank if epoch == 0 else size - rank
        with wrap.join(model):
            train(model, optimizer, rank, range(first, first + 2 + more))
    model(batch(50, rank)).square().mean().backward()
    return everything(module)


def join_with_a_rank_without_inputs(wrap, rank, size):
    return _uneven(wrap, rank, inputs=0 if rank == 0 else 3)


def join_of_two_models(wrap, rank, size):
    """GAN-like: both step once per input."""
    wrap.need_class()
    one, other = linear(), linear(2.0)
    oa, ob = sgd(one), sgd(other)
    a, b = wrap(one, oa), wrap(other, ob)
    with Join([a, b]):
        for step in range(2 + rank):
            oa.zero_grad()
            a(x(rank, step + 1.0)).sum().backward()
            oa.step()
            ob.zero_grad()
            b(x(rank, step + 1.0)).sum().backward()
            ob.step()
    return weights(one, "one") | weights(other, "other")


def join_with_the_sharded_optimizer(wrap, rank, size):
    """A rank that is through still steps for its shard: with an old gradient in torch."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrap.need_class()
    module = perceptron()
    model = wrap(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        train(model, optimizer, rank, range(2 + rank))
    return weights(module)


def _uneven_alone(rank, size):
    """Ranks that are through add zero to the mean."""
    module = perceptron()

    def losses(step):
        own = [module(batch(step, r)).square().mean() for r in range(size)]
        return [loss if step < 2 + r else 0 * loss for r, loss in enumerate(own)]

    return weights(alone(module, sgd(module), losses, 1 + size))


EXCEPTIONS = [
    row(
        join_with_the_sharded_optimizer,
        klass=better(_uneven_alone, "torch's shards of ranks that are through get old gradients"),
    ),
]
