"""One parameter in several wrappers."""

import torch
from ranks.situations.rows import better, refused, row
from ranks.situations.values import (
    batch,
    everything,
    grads,
    linear,
    perceptron,
    sgd,
    train,
    weights,
    x,
)
from torch import nn


def copying(wrap):
    """The implementation with copied gradients, which is torch's default."""

    def wrapped(module, optimizer=None, **arguments):
        return wrap(module, optimizer, gradient_as_bucket_view=False, **arguments)

    wrapped.inner, wrapped.no_sync = wrap.inner, wrap.no_sync
    return wrapped


def _trunk_and_heads():
    torch.manual_seed(0)
    trunk = nn.Linear(5, 4)
    return (
        trunk,
        nn.Sequential(trunk, nn.Tanh(), nn.Linear(4, 2)),
        nn.Sequential(trunk, nn.Tanh(), nn.Linear(4, 1)),
    )


def the_same_module_wrapped_again_after_the_first_is_gone(wrap, rank, size):
    module = linear()
    model = wrap(module)
    model(x(rank)).sum().backward()
    module.zero_grad()
    del model
    model = wrap(module)
    model(x(rank)).sum().backward()
    return grads(module)


def two_wrappers_trained_in_turn(wrap, rank, size):
    module = linear()
    one, other = wrap(module), wrap(module)
    result = {}
    for step, model in enumerate((one, other, one, other)):
        module.zero_grad()
        model(x(rank)).sum().backward()
        result |= grads(module, f"step{step}")
    return result


def two_wrappers_one_for_validation(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    train, val = wrap(module, optimizer), wrap(module)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        train(batch(step, rank)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            losses.append(val(batch(50, rank)).sum())
    return everything(module) | {"losses": losses}


def shared_trunk_own_optimizers(wrap, rank, size):
    """Actor and critic on one trunk, each with an optimizer."""
    _trunk, actor, critic = _trunk_and_heads()
    ao, co = sgd(actor), sgd(critic)
    a, c = wrap(actor, ao), wrap(critic, co)
    for step in range(3):
        ao.zero_grad()
        a(batch(step, rank)).square().mean().backward()
        ao.step()
        co.zero_grad()
        c(batch(step + 10, rank)).square().mean().backward()
        co.step()
    return weights(actor, "actor") | weights(critic, "critic")


def encoder_under_two_heads_summed(wrap, rank, size):
    _trunk, one, other = _trunk_and_heads()
    parameters = dict.fromkeys([*one.parameters(), *other.parameters()])
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    a, b = wrap(one), wrap(other)
    for step in range(3):
        optimizer.zero_grad()
        data = batch(step, rank)
        (a(data).square().mean() + b(data).square().mean()).backward()
        optimizer.step()
    return everything(one, "one.") | everything(other, "other.")


def encoder_under_two_heads_a_then_b(wrap, rank, size):
    """Two forwards first, then two backwards in the same order."""
    _trunk, one, other = _trunk_and_heads()
    a, b = wrap(one), wrap(other)
    data = batch(0, rank)
    first, second = a(data).square().mean(), b(data).square().mean()
    first.backward()
    second.backward()
    return grads(one, "one") | grads(other, "other")


def encoder_under_two_heads_b_then_a(wrap, rank, size):
    _trunk, one, other = _trunk_and_heads()
    a, b = wrap(one), wrap(other)
    data = batch(0, rank)
    first, second = a(data).square().mean(), b(data).square().mean()
    second.backward()
    first.backward()
    return grads(one, "one") | grads(other, "other")


def two_heads_with_gradients_zeroed_between(wrap, rank, size):
    _trunk, one, other = _trunk_and_heads()
    a, b = wrap(one), wrap(other)
    data = batch(0, rank)
    a(data).square().mean().backward()
    first = grads(one, "one")
    one.zero_grad()
    b(data).square().mean().backward()
    return first | grads(other, "other")


def a_wrapped_module_inside_a_wrapped_one_for_steps(wrap, rank, size):
    torch.manual_seed(0)
    inside = wrap(nn.Linear(5, 4))
    outside = nn.Sequential(inside, nn.Tanh(), nn.Linear(4, 2))
    optimizer = sgd(outside)
    model = wrap(outside, optimizer)
    train(model, optimizer, rank)
    both = [p.detach() for p in model.parameters()]
    return {f"weight{number}": p for number, p in enumerate(both)}


def shared_trunk_own_optimizers_with_copies(wrap, rank, size):
    return shared_trunk_own_optimizers(copying(wrap), rank, size)


def encoder_under_two_heads_summed_with_copies(wrap, rank, size):
    return encoder_under_two_heads_summed(copying(wrap), rank, size)


def two_heads_with_gradients_zeroed_between_with_copies(wrap, rank, size):
    return two_heads_with_gradients_zeroed_between(copying(wrap), rank, size)


def a_wrapped_module_inside_a_wrapped_one_for_steps_with_copies(wrap, rank, size):
    return a_wrapped_module_inside_a_wrapped_one_for_steps(copying(wrap), rank, size)


def _sequential(order):
    """Two backwards one after the other, of the mean losses."""

    def oracle(rank, size):
        _, one, other = _trunk_and_heads()
        for module in (one, other) if order == "ab" else (other, one):
            parts = [module(batch(0, r)).square().mean() for r in range(size)]
            (sum(parts) / size).backward()
        return grads(one, "one") | grads(other, "other")

    return oracle


SHARED = refused(
    "belongs to module .* too",
    "gradients are views of one wrapper's buckets; do_flatten=False or the class share",
)


TORCH_RAISES = "torch raises 'Expected to mark a variable ready only once'"


SITUATIONS = [
    row(the_same_module_wrapped_again_after_the_first_is_gone),
    row(two_wrappers_trained_in_turn),
    row(two_wrappers_one_for_validation),
    row(shared_trunk_own_optimizers, method=SHARED),
    row(shared_trunk_own_optimizers_with_copies),
    row(encoder_under_two_heads_summed, method=SHARED),
    row(encoder_under_two_heads_summed_with_copies),
    row(
        encoder_under_two_heads_a_then_b,
        klass=better(_sequential("ab"), TORCH_RAISES),
        method=SHARED,
    ),
    row(
        encoder_under_two_heads_b_then_a,
        klass=better(_sequential("ba"), TORCH_RAISES),
        method=SHARED,
    ),
    row(two_heads_with_gradients_zeroed_between, method=SHARED),
    row(two_heads_with_gradients_zeroed_between_with_copies),
    row(a_wrapped_module_inside_a_wrapped_one_for_steps, method=SHARED),
    row(a_wrapped_module_inside_a_wrapped_one_for_steps_with_copies),
]
