"""Arguments and members of the class, inputs, outputs, functional_call."""

import collections
import dataclasses

import torch
import torch.distributed as dist
from ranks.situations.rows import refused, row
from ranks.situations.values import (
    alone,
    batch,
    everything,
    grads,
    linear,
    normalised,
    perceptron,
    sgd,
    square_losses,
    started,
    train,
    trained,
    weights,
    x,
)
from torch import nn


def weights_of_each_rank_at_the_wrap(wrap, rank, size):
    module = perceptron(seed=rank)
    trained(wrap, rank, module)
    return everything(module)


def weights_of_each_rank_without_init_sync(wrap, rank, size):
    wrap.need_class()
    module = perceptron(seed=rank)
    trained(wrap, rank, module, init_sync=False)
    return weights(module)


def several_arguments(wrap, rank, size):
    module = normalised()
    trained(
        wrap,
        rank,
        module,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        bucket_cap_mb=1,
    )
    return everything(module)


def members_that_scripts_read(wrap, rank, size):
    wrap.need_class()
    model = wrap(perceptron())
    return {
        "device": str(model.device),
        "device_type": model.device_type,
        "device_ids": str(model.device_ids),
        "output_device": str(model.output_device),
        "dim": model.dim,
        "broadcast_buffers": bool(model.broadcast_buffers),
        "find_unused_parameters": model.find_unused_parameters,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
        "static_graph": model.static_graph,
        "group": model.process_group is dist.group.WORLD,
        "sync": model.require_backward_grad_sync,
        "multi": model.is_multi_device_module,
        "join": str(model.join_device),
        "ignored": model.parameters_to_ignore == set(),
    }


def keyword_and_nested_inputs(wrap, rank, size):
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, first, *rest, scale=1.0, **more):
            return self.layer(first + sum(rest) + more["nested"]["deep"][0]) * scale

    module = Keywords()
    model = wrap(module)
    nested = {"deep": [x(rank)]}
    model(x(rank), x(rank), scale=2.0, nested=nested).sum().backward()
    return grads(module)


def functional_call_on_the_wrapper(wrap, rank, size):
    """Other weights through the wrapper: their gradients are local, then a plain step."""
    module, model, optimizer = started(wrap, perceptron())
    result = {}
    for step in range(2):
        others = {n: (p.detach() * 0.5).requires_grad_() for n, p in model.named_parameters()}
        output = torch.func.functional_call(model, others, (batch(step, rank),))
        loss = output.square().mean()
        own = torch.autograd.grad(loss, list(others.values()))
        result[f"own{step}"] = torch.stack([g.sum() for g in own])
        train(model, optimizer, rank, [step])
    return everything(module) | result


def functional_call_with_other_leaves(wrap, rank, size):
    """A backward to other weights through the wrapper: the module's own keep what they have."""
    module, model, optimizer = started(wrap, perceptron())
    result = {}
    for step in range(2):
        others = {n: (p.detach() * 0.5).requires_grad_() for n, p in model.named_parameters()}
        torch.func.functional_call(model, others, (batch(step, rank),)).square().mean().backward()
        result[f"others{step}"] = torch.stack([p.grad.sum() for p in others.values()])
        result |= {f"{name} {step}": value for name, value in grads(module).items()}
        train(model, optimizer, rank, [step])
    return everything(module) | result


def forward_called_directly(wrap, rank, size):
    """`model.forward(x)` instead of `model(x)`, of the class."""
    wrap.need_class()
    module = linear()
    model = wrap(module)
    model.forward(x(rank)).sum().backward()
    return grads(module)


def _from_rank_0(rank, size):
    module = perceptron()
    return weights(alone(module, sgd(module), square_losses(module, size), 3))


class Returning(nn.Module):
    """A layer whose output is `of(layer, inputs)`."""

    def __init__(self, of):
        super().__init__()
        self.layer, self.of = linear(), of

    def forward(self, inputs):
        return self.of(self.layer, inputs)


def _returning(wrap, rank, of, loss):
    """Three steps on `loss(output)`."""
    module = Returning(of)
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    inputs = x(rank).requires_grad_()
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(inputs)).backward()
        optimizer.step()
    return everything(module) | {"inputs": inputs.grad}


def a_forward_that_returns_only_a_parameter(wrap, rank, size):
    return _returning(
        wrap,
        rank,
        lambda layer, inputs: layer.weight,
        lambda output: (output * (rank + 1)).sum(),
    )


def a_forward_that_returns_its_input(wrap, rank, size):
    return _returning(
        wrap,
        rank,
        lambda layer, inputs: (layer(inputs), inputs),
        lambda output: output[0].sum() + output[1].sum(),
    )


class Box:
    """An object of the user's: no tensor in it is found."""

    def __init__(self, value):
        self.value = value


def a_forward_without_tensors(wrap, rank, size):
    return _returning(
        wrap, rank, lambda layer, inputs: Box(layer(inputs)), lambda output: output.value.sum()
    )


Pair = collections.namedtuple("Pair", "one other")


@dataclasses.dataclass
class Data:
    one: torch.Tensor


def outputs_in_containers(wrap, rank, size):
    """Dicts, tuples, lists, named tuples and data classes of tensors."""

    def of(layer, inputs):
        out = layer(inputs)
        return {"a": [out, (out * 2,)], "b": Pair(out, None), "c": Data(out * 3)}

    def loss(output):
        return (output["a"][1][0] + output["b"].one + output["c"].one).sum()

    return _returning(wrap, rank, of, loss)


EXCEPTIONS = [
    row(
        weights_of_each_rank_without_init_sync,
        klass=refused(
            "ranks hold different weights", "torch's ranks train apart from the start", _from_rank_0
        ),
    ),
]
