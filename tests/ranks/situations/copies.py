"""Copies, pickles, state dicts, checkpoints and calls past the wrapper."""

import copy
import io

import torch
from ranks.situations.rows import refused, row, same, warned
from ranks.situations.values import (
    alone,
    batch,
    everything,
    grads,
    linear,
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


def _trained(wrap, rank, module, steps=2):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return trained(wrap, rank, module, range(steps), optimizer=optimizer)


def a_deep_copy_is_trained(wrap, rank, size):
    module, calls = linear(), []
    module.register_forward_hook(lambda *_: calls.append(1))
    model = wrap(module)
    twin = copy.deepcopy(model)
    twin(x(rank)).sum().backward()
    inner = twin.module if hasattr(twin, "module") else twin
    return grads(inner) | {"calls": torch.tensor(calls)}


def a_deep_copy_of_the_inner_module_is_trained(wrap, rank, size):
    """Nobody wrapped the copy: local in torch, and of with_bagua a copy of the model itself."""
    wrap.need_class()
    model = wrap(linear())
    twin = copy.deepcopy(model.module)
    twin(x(rank)).sum().backward()
    return grads(twin)


def averaged_model(wrap, rank, size):
    """torch.optim.swa_utils copies the wrapper."""
    from torch.optim.swa_utils import AveragedModel

    model, optimizer = _trained(wrap, rank, perceptron(), steps=1)
    average = AveragedModel(model)
    for step in range(1, 4):
        train(model, optimizer, rank, [step])
        average.update_parameters(model)
    with torch.no_grad():
        output = average(batch(9, 0))
    return {"output": output} | weights(wrap.inner(model))


def _saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def a_saved_wrapper_is_loaded_and_trained(wrap, rank, size):
    """torch's class synchronises after unpickling."""
    model = wrap(linear())
    twin = _saved(model)
    twin(x(rank)).sum().backward()
    inner = twin.module if hasattr(twin, "module") else twin
    return grads(inner)


def state_dict_loaded_before_the_wrap(wrap, rank, size):
    """Only rank 0 has the checkpoint; the wrap gives it to all."""
    model, _ = _trained(wrap, rank, perceptron())
    module = perceptron(seed=1)
    if rank == 0:
        module.load_state_dict(wrap.inner(model).state_dict())
    model = wrap(module)
    model(batch(5, rank)).square().mean().backward()
    return everything(module)


def state_dict_loaded_in_the_middle(wrap, rank, size):
    """Back to the best weights, without a new wrap."""
    model, optimizer = _trained(wrap, rank, perceptron(), steps=1)
    best = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for step in range(1, 4):
        if step == 3:
            model.load_state_dict(best[0])
            optimizer.load_state_dict(best[1])
        train(model, optimizer, rank, [step])
    return everything(wrap.inner(model))


def state_dict_assigned(wrap, rank, size):
    """`load_state_dict(assign=True)` replaces parameters: torch's ranks drift apart."""
    module = perceptron()
    model = wrap(module)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    optimizer = sgd(module)
    train(model, optimizer, rank, range(2))
    return everything(module)


def get_and_set_state_dict(wrap, rank, size):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = _trained(wrap, rank, perceptron())
    saved, of_optimizer = get_state_dict(model, optimizer)
    saved = {name: value.clone() for name, value in saved.items()}
    of_optimizer = copy.deepcopy(of_optimizer)
    names = {"optimizer": sorted(of_optimizer["state"]), "model": sorted(saved)}
    for p in model.parameters():
        p.data.zero_()
    set_state_dict(model, optimizer, model_state_dict=saved, optim_state_dict=of_optimizer)
    train(model, optimizer, rank, [5])
    return everything(wrap.inner(model)) | names


def a_call_past_the_wrapper(wrap, rank, size):
    """`ddp.module(x)` is not the wrapper's forward: torch's gradients are local or synchronised
    as the last forward left it.
    """
    wrap.need_class()
    model = wrap(linear())
    model.module(x(rank)).sum().backward()
    return grads(model.module)


def a_call_past_the_wrapper_between_forward_and_backward(wrap, rank, size):
    """Two outputs in one loss, one of them by `.module`."""
    wrap.need_class()
    model = wrap(linear())
    one = model(x(rank))
    other = model.module(x(rank, 10.0))
    (one + other).sum().backward()
    return grads(model.module)


def a_method_of_the_inner_module_in_the_loss(wrap, rank, size):
    """A forward of the wrapper, and a part of the module called beside it."""
    module = nn.Sequential(linear(), nn.Linear(1, 1, bias=False))
    nn.init.constant_(module[1].weight, 1.0)
    model = wrap(module)
    out = model(x(rank))
    extra = wrap.inner(model)[0](x(rank, 10.0))
    (out.sum() + extra.sum()).backward()
    return grads(wrap.inner(model))


def saved_and_copied_in_the_middle_of_training(wrap, rank, size):
    """Neither changes training."""
    module, model, optimizer = started(wrap, perceptron())
    for step in range(4):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).square().mean()
        _saved(module)
        copy.deepcopy(module)
        loss.backward()
        _saved(module)
        copies = copy.deepcopy([p.grad for p in module.parameters()])
        optimizer.step()
    return everything(module) | {"copies": copies}


def _two_steps(rank, size):
    module = perceptron()
    return weights(alone(module, sgd(module), square_losses(module, size), 2))


WARNS = warned("cop(y|ies)", "a copy is an ordinary module, which may be trained alone on purpose")


PAST = "past|module"


EXCEPTIONS = [
    row(a_deep_copy_is_trained, method=WARNS),
    row(a_saved_wrapper_is_loaded_and_trained, method=WARNS),
    row(
        state_dict_assigned,
        both=refused(
            r"(Call|call) bagua.wrap again|[Ww]rap .*again|DistributedDataParallel again",
            "torch's ranks drift apart; copy values, or wrap again",
            _two_steps,
        ),
    ),
    row(a_call_past_the_wrapper, klass=same(PAST)),
]
