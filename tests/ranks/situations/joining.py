"""Uneven inputs: join() of the class, alone and with others."""

import torch
from ranks.situations.rows import ONLY_CLASS, better, row
from ranks.situations.values import (
    alone,
    batch,
    everything,
    grads,
    linear,
    normalised,
    perceptron,
    sgd,
    train,
    weights,
    x,
)
from torch.distributed.algorithms.join import Join


def _uneven(wrap, rank, inputs=None, mode=True, **arguments):
    """The weights after a join in which this rank has `inputs`: by default one more than another.

    mode: False trains in `eval()`.
    """
    module = linear()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    model.train(mode)
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


def join_not_enabled(wrap, rank, size):
    return _uneven(wrap, rank, inputs=2, enable=False)


def join_with_even_inputs(wrap, rank, size):
    return _uneven(wrap, rank, inputs=2)


def join_that_throws_early(wrap, rank, size):
    try:
        _uneven(wrap, rank, throw_on_early_termination=True)
    except RuntimeError as error:
        return {"told": "exhausted" in str(error)}
    return {"told": None}


def gradients_during_a_join(wrap, rank, size):
    """What ranks with inputs see while others have none."""
    module = linear()
    model = wrap(module)
    seen = []
    with wrap.join(model):
        for step in range(2 + rank):
            module.zero_grad()
            model(x(rank, step + 1.0)).sum().backward()
            seen.append(module.weight.grad.clone())
    return {f"seen{number}": value for number, value in enumerate(seen)}


def zero_grad_after_the_step_in_a_join(wrap, rank, size):
    """Two epochs: what was left in `.grad` of ranks that were through does not enter the next."""
    module = linear()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
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


def join_with_batch_norm(wrap, rank, size):
    module = normalised()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    with wrap.join(model):
        train(model, optimizer, rank, range(2 + rank))
    return everything(module)


def join_with_no_sync_inside(wrap, rank, size):
    """Accumulation in a join. Every rank has whole groups of micro-batches."""
    module = linear()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    with wrap.join(model):
        for step in range(2 + rank):
            optimizer.zero_grad()
            with wrap.no_sync(model):
                model(x(rank, step + 1.0)).sum().backward()
            model(x(rank, 10.0)).sum().backward()
            optimizer.step()
    return weights(module)


def join_in_eval(wrap, rank, size):
    return _uneven(wrap, rank, mode=False)


def join_of_two_epochs(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
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


def _with_the_sharded_optimizer(wrap, rank, **arguments):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrap.need_class()
    module = perceptron()
    model = wrap(module, **arguments)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        train(model, optimizer, rank, range(2 + rank))
    return weights(module)


def join_with_the_sharded_optimizer(wrap, rank, size):
    """A rank that is through still steps for its shard: with an old gradient in torch."""
    return _with_the_sharded_optimizer(wrap, rank)


def join_with_the_sharded_optimizer_and_bucket_views(wrap, rank, size):
    return _with_the_sharded_optimizer(wrap, rank, gradient_as_bucket_view=True)


def _uneven_alone(rank, size):
    """Ranks that are through add zero to the mean."""
    module = perceptron()

    def losses(step):
        own = [module(batch(step, r)).square().mean() for r in range(size)]
        return [loss if step < 2 + r else 0 * loss for r, loss in enumerate(own)]

    return weights(alone(module, sgd(module), losses, 1 + size))


SITUATIONS = [
    row(join_divided_by_all_ranks, method=ONLY_CLASS),
    row(join_divided_by_those_left, method=ONLY_CLASS),
    row(join_not_enabled, method=ONLY_CLASS),
    row(join_with_even_inputs, method=ONLY_CLASS),
    row(join_that_throws_early, method=ONLY_CLASS),
    row(gradients_during_a_join, method=ONLY_CLASS),
    row(zero_grad_after_the_step_in_a_join, method=ONLY_CLASS),
    row(gradient_of_a_rank_that_is_through, method=ONLY_CLASS),
    row(join_with_batch_norm, method=ONLY_CLASS),
    row(join_with_no_sync_inside, method=ONLY_CLASS),
    row(join_in_eval, method=ONLY_CLASS),
    row(join_of_two_epochs, method=ONLY_CLASS),
    row(join_with_a_rank_without_inputs, method=ONLY_CLASS),
    row(join_of_two_models, method=ONLY_CLASS),
    row(
        join_with_the_sharded_optimizer,
        klass=better(_uneven_alone, "torch's shards of ranks that are through get old gradients"),
        method=ONLY_CLASS,
    ),
    row(
        join_with_the_sharded_optimizer_and_bucket_views,
        klass=better(_uneven_alone, "torch's shards of ranks that are through get old gradients"),
        method=ONLY_CLASS,
    ),
]
