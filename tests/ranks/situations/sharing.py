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
    trained,
    weights,
    x,
)
from torch import nn

#: torch's default; those that `with_bagua` gives must be asked for.
COPIED = {"gradient_as_bucket_view": False}


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
    model, val = wrap(module, optimizer), wrap(module)
    losses = []
    for step in range(3):
        train(model, optimizer, rank, [step])
        with torch.no_grad():
            losses.append(val(batch(50, rank)).sum())
    return everything(module) | {"losses": losses}


def shared_trunk_own_optimizers(wrap, rank, size):
    """Actor and critic on one trunk, each with an optimizer."""
    _trunk, actor, critic = _trunk_and_heads()
    ao, co = sgd(actor), sgd(critic)
    a, c = wrap(actor, ao, **COPIED), wrap(critic, co, **COPIED)
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
    a, b = wrap(one, **COPIED), wrap(other, **COPIED)
    for step in range(3):
        optimizer.zero_grad()
        data = batch(step, rank)
        (a(data).square().mean() + b(data).square().mean()).backward()
        optimizer.step()
    return everything(one, "one.") | everything(other, "other.")


def _two_forwards_first(wrap, rank, backwards, **arguments):
    """Two forwards, then two backwards in the order of `backwards`."""
    _trunk, one, other = _trunk_and_heads()
    models = wrap(one, **arguments), wrap(other, **arguments)
    losses = [model(batch(0, rank)).square().mean() for model in models]
    for number in backwards:
        losses[number].backward()
    return grads(one, "one") | grads(other, "other")


def encoder_under_two_heads_a_then_b(wrap, rank, size):
    return _two_forwards_first(wrap, rank, (0, 1), **COPIED)


def encoder_under_two_heads_b_then_a(wrap, rank, size):
    return _two_forwards_first(wrap, rank, (1, 0))


def two_heads_with_gradients_zeroed_between(wrap, rank, size):
    _trunk, one, other = _trunk_and_heads()
    a, b = wrap(one, **COPIED), wrap(other, **COPIED)
    data = batch(0, rank)
    a(data).square().mean().backward()
    first = grads(one, "one")
    one.zero_grad()
    b(data).square().mean().backward()
    return first | grads(other, "other")


def a_wrapped_module_inside_a_wrapped_one(wrap, rank, size):
    torch.manual_seed(0)
    inside = wrap(nn.Linear(5, 4), **COPIED)
    outside = nn.Sequential(inside, nn.Tanh(), nn.Linear(4, 2))
    model, _ = trained(wrap, rank, outside, **COPIED)
    return {f"weight{number}": p for number, p in enumerate(model.parameters())}


def _sequential(*order):
    """Two backwards one after the other, of the mean losses."""

    def oracle(rank, size):
        _, *modules = _trunk_and_heads()
        for module in (modules[number] for number in order):
            parts = [module(batch(0, r)).square().mean() for r in range(size)]
            (sum(parts) / size).backward()
        return grads(modules[0], "one") | grads(modules[1], "other")

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
    row(shared_trunk_own_optimizers),
    row(encoder_under_two_heads_summed),
    row(encoder_under_two_heads_a_then_b, both=better(_sequential(0, 1), TORCH_RAISES)),
    row(
        encoder_under_two_heads_b_then_a,
        klass=better(_sequential(1, 0), TORCH_RAISES),
        method=SHARED,
    ),
    row(two_heads_with_gradients_zeroed_between),
    row(a_wrapped_module_inside_a_wrapped_one),
]
