"""Arguments and members of the class, inputs, functional_call."""

import contextlib
import warnings

import torch
import torch.distributed as dist
from ranks.situations.rows import ONLY_CLASS, refused, row
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


def small_buckets(wrap, rank, size):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(20, 20) for _ in range(5)))
    trained(wrap, rank, module, data=lambda s, r: batch(s, r, 3, 20), bucket_cap_mb=0.001)
    return everything(module)


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


def device_mesh(wrap, rank, size):
    wrap.need_class()
    mesh = dist.init_device_mesh("cpu", (size,))
    module = perceptron()
    model, _ = trained(wrap, rank, module, device_mesh=mesh)
    return everything(module) | {"mesh": model.device_mesh.size()}


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


def custom_attributes_and_methods_of_the_module(wrap, rank, size):
    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()
            self.temperature = 2.0

        def forward(self, inputs):
            return self.encode(inputs) * self.temperature

        def encode(self, inputs):
            return self.layer(inputs)

    model = wrap(Custom())
    inner = wrap.inner(model)
    inner.temperature = 3.0
    model(x(rank)).sum().backward()
    return grads(inner) | {"encoded": inner.encode(x(rank)).detach()}


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


def functional_call_on_the_inner_module(wrap, rank, size):
    """A loss of other weights without the wrapper: nothing is communicated."""
    module = perceptron()
    model = wrap(module)
    inner = wrap.inner(model)
    others = {name: p.detach() * 0.5 for name, p in inner.named_parameters()}
    with torch.no_grad():
        output = torch.func.functional_call(inner, others, (batch(0, rank),))
    model(batch(0, rank)).square().mean().backward()
    return grads(inner) | {"output": output}


def functional_call_on_the_wrapper(wrap, rank, size):
    """Other weights through the wrapper: their gradients are local, then a plain step."""
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
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
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    result = {}
    for step in range(2):
        others = {n: (p.detach() * 0.5).requires_grad_() for n, p in model.named_parameters()}
        torch.func.functional_call(model, others, (batch(step, rank),)).square().mean().backward()
        result[f"others{step}"] = torch.stack([p.grad.sum() for p in others.values()])
        result |= {f"{name} {step}": value for name, value in grads(module).items()}
        train(model, optimizer, rank, [step])
    return everything(module) | result


def functional_call_with_the_parameters_themselves(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        own = dict(model.named_parameters())
        torch.func.functional_call(model, own, (batch(step, rank),)).square().mean().backward()
        optimizer.step()
    return everything(module)


def functional_call_with_functions_of_the_parameters(wrap, rank, size):
    """Weights that are computed from the wrapped module's, and differentiated to them."""
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        twice = {name: 2 * p for name, p in model.named_parameters()}
        torch.func.functional_call(model, twice, (batch(step, rank),)).square().mean().backward()
        optimizer.step()
    return everything(module)


def forward_called_directly(wrap, rank, size):
    """`model.forward(x)` instead of `model(x)`, of the class."""
    wrap.need_class()
    module = linear()
    model = wrap(module)
    model.forward(x(rank)).sum().backward()
    return grads(module)


def anomaly_detection(wrap, rank, size):
    module = perceptron()
    with warnings.catch_warnings(), torch.autograd.detect_anomaly():
        warnings.simplefilter("ignore")
        trained(wrap, rank, module)
    return everything(module)


def an_exception_in_the_forward_then_training(wrap, rank, size):
    """All ranks skip the batch that fails, as for lack of memory."""

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.fail = linear(), False

        def forward(self, inputs):
            output = self.layer(inputs)
            if self.fail:
                raise MemoryError
            return output

    module = Failing()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        module.fail = step == 2
        with contextlib.suppress(MemoryError):
            model(x(rank)).sum().backward()
            optimizer.step()
    return everything(module)


def _from_rank_0(rank, size):
    module = perceptron()
    return weights(alone(module, sgd(module), square_losses(module, size), 3))


SITUATIONS = [
    row(weights_of_each_rank_at_the_wrap),
    row(
        weights_of_each_rank_without_init_sync,
        klass=refused(
            "ranks hold different weights", "torch's ranks train apart from the start", _from_rank_0
        ),
        method=ONLY_CLASS,
    ),
    row(small_buckets),
    row(several_arguments),
    row(device_mesh, method=ONLY_CLASS),
    row(members_that_scripts_read, method=ONLY_CLASS),
    row(custom_attributes_and_methods_of_the_module),
    row(keyword_and_nested_inputs),
    row(functional_call_on_the_inner_module),
    row(functional_call_on_the_wrapper),
    row(functional_call_with_other_leaves),
    row(functional_call_with_the_parameters_themselves),
    row(functional_call_with_functions_of_the_parameters),
    row(forward_called_directly, method=ONLY_CLASS),
    row(anomaly_detection),
    row(an_exception_in_the_forward_then_training),
]
