"""Modules that change after the wrap: weight norm, parametrisations, pruning, replaced weights."""

import warnings

import torch
from ranks.situations.rows import better, raises, refused, row
from ranks.situations.values import (
    alone,
    batch,
    everything,
    perceptron,
    sgd,
    started,
    train,
    trained,
    weights,
)
from torch import nn


def cast_after_the_wrap(wrap, rank, size):
    """`.double()` after the wrap: torch's ranks drift apart or fail."""
    module = perceptron()
    model = wrap(module)
    model.double()
    optimizer = sgd(module)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank).double()).square().mean().backward()
        optimizer.step()
    return everything(module)


def weight_norm_removed_for_inference(wrap, rank, size):
    """HiFi-GAN: `remove_weight_norm()` after training, on the wrapped module."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.utils.weight_norm(nn.Linear(5, 3))
    module = nn.Sequential(layer)
    model, _ = trained(wrap, rank, module)
    nn.utils.remove_weight_norm(module[0])
    model.eval()
    with torch.no_grad():
        output = model(batch(9, 0))
    return weights(module) | {"output": output}


def parametrization_removed_from_the_root(wrap, rank, size):
    """The wrapped module itself is parametrised."""
    torch.manual_seed(0)
    module = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))
    model, _ = trained(wrap, rank, module)
    nn.utils.parametrize.remove_parametrizations(wrap.inner(model), "weight")
    with torch.no_grad():
        output = model(batch(9, 0))
    return {"weight": module.weight, "output": output}


def parametrization_registered_on_the_wrapped_root(wrap, rank, size):
    """After the wrap, of the root: its class changes once more."""
    torch.manual_seed(0)

    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    module = nn.Linear(5, 3)
    model = wrap(module)
    nn.utils.parametrize.register_parametrization(wrap.inner(model), "weight", Double())
    model(batch(0, rank)).square().mean().backward()
    return {"grad": module.parametrizations.weight.original.grad, "bias": module.bias.grad}


def pruning_in_training_with_a_frozen_parameter(wrap, rank, size):
    """Lightning's ModelPruning prunes between steps, and makes the pruning permanent at the end."""
    from torch.nn.utils import prune

    module = perceptron()
    module[0].bias.requires_grad_(False)
    model, optimizer = trained(wrap, rank, module)
    for first, amount in ((3, 0.3), (5, 0.5)):
        prune.l1_unstructured(module[0], "weight", amount)
        prune.random_unstructured(module[2], "weight", amount)
        train(model, optimizer, rank, range(first, first + 2))
    prune.remove(module[0], "weight")
    train(model, optimizer, rank, [7])
    return everything(module)


def spectral_norm_of_old_after_the_wrap(wrap, rank, size):
    """The same parameter, under the name `weight_orig`."""
    module = perceptron()
    model, optimizer = trained(wrap, rank, module)
    nn.utils.spectral_norm(module[0])
    train(model, optimizer, rank, range(3, 6))
    return everything(module)


def weight_replaced_by_a_new_parameter(wrap, rank, size):
    """A head is replaced after the wrap: torch trains it alone."""
    module = perceptron()
    model = wrap(module)
    torch.manual_seed(1)
    module[2] = nn.Linear(7, 3)
    optimizer = sgd(module)
    train(model, optimizer, rank, range(2))
    return everything(module)


def data_of_a_weight_replaced(wrap, rank, size):
    """`p.data = tensor`, as quantisation and weight clipping do."""
    module, model, optimizer = started(wrap, perceptron())
    for step in range(4):
        train(model, optimizer, rank, [step])
        for p in module.parameters():
            p.data = p.data.clamp(-0.3, 0.3)
    return everything(module)


def _cast(rank, size):
    module = perceptron().double()

    def losses(step):
        return [module(batch(step, r).double()).square().mean() for r in range(size)]

    return weights(alone(module, sgd(module), losses, 3))


def _parametrized(rank, size):
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    losses = [2 * batch(0, r) @ module.weight.t() + module.bias for r in range(size)]
    (sum(loss.square().mean() for loss in losses) / size).backward()
    return {"grad": module.weight.grad, "bias": module.bias.grad}


AGAIN = r"(Call|call) bagua.wrap again|[Ww]rap .*again|DistributedDataParallel again"


DRIFT = "torch's ranks drift apart without a word; wrap again afterwards"


EXCEPTIONS = [
    row(cast_after_the_wrap, both=refused(AGAIN, DRIFT, _cast)),
    row(
        parametrization_removed_from_the_root,
        method=refused(
            "has no attribute 'weight'",
            "bagua.wrap has changed the class that torch would restore; copy.deepcopy(model) has "
            "the module's own",
        ),
    ),
    row(
        parametrization_registered_on_the_wrapped_root,
        both=better(_parametrized, "torch communicates nothing any more: its ranks drift apart"),
    ),
    row(weight_replaced_by_a_new_parameter, both=raises(AGAIN)),
]
