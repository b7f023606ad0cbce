"""Train and eval mode, grad mode, and gradients without backward()."""

import torch
from ranks.situations.rows import row
from ranks.situations.values import (
    batch,
    everything,
    gradient,
    grads,
    linear,
    perceptron,
    sgd,
    train,
    weights,
    x,
)
from torch import nn


def plain_step(wrap, rank, size):
    model = wrap(linear())
    model(x(rank)).sum().backward()
    return grads(wrap.inner(model))


def eval_backward(wrap, rank, size):
    model = wrap(linear())
    model.eval()
    model(x(rank)).sum().backward()
    return grads(wrap.inner(model))


def eval_of_the_inner_module(wrap, rank, size):
    model = wrap(linear())
    wrap.inner(model).eval()
    model(x(rank)).sum().backward()
    return grads(wrap.inner(model))


def eval_after_training_and_back(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(6):
        model.train(step % 2 == 0)
        train(model, optimizer, rank, [step])
    return everything(wrap.inner(model))


def validation_of_one_rank_of_the_inner_module_with_grad(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(3):
        train(model, optimizer, rank, [step])
        if rank == 0:
            model.eval()
            model(batch(step + 50, rank))
            model.train()
    return everything(wrap.inner(model))


def inference_mode_between_steps(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    losses = []
    for step in range(3):
        train(model, optimizer, rank, [step])
        with torch.inference_mode():
            losses.append(model(batch(9, 0)).sum())
    return weights(wrap.inner(model)) | {"losses": torch.stack(losses)}


def no_grad_in_train_mode_between_steps(wrap, rank, size):
    module = perceptron()
    optimizer = sgd(module)
    model = wrap(module, optimizer)
    for step in range(3):
        with torch.no_grad():
            target = model(batch(step + 7, rank))
        optimizer.zero_grad()
        (model(batch(step, rank)) - target).square().mean().backward()
        optimizer.step()
    return everything(wrap.inner(model))


def set_grad_enabled_inside_the_forward(wrap, rank, size):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, inputs):
            with torch.set_grad_enabled(False):
                hidden = self.first(inputs)
            return self.second(hidden)

    torch.manual_seed(0)
    module = Partly()
    module.first.requires_grad_(False)
    model = wrap(module)
    model(batch(0, rank)).sum().backward()
    return grads(wrap.inner(model))


def enable_grad_inside_no_grad(wrap, rank, size):
    """Attacks and test-time training enable gradients inside an evaluation."""
    model = wrap(linear())
    model.eval()
    with torch.no_grad():
        model(x(rank, 9.0))
        with torch.enable_grad():
            model(x(rank)).sum().backward()
    return grads(wrap.inner(model))


def autograd_grad_of_inputs_only(wrap, rank, size):
    """torch.autograd.grad reaches no parameter; the training step afterwards is a plain one."""
    model = wrap(linear())
    inputs = x(rank).requires_grad_()
    (saliency,) = torch.autograd.grad(model(inputs).sum(), inputs)
    model(x(rank)).sum().backward()
    return grads(wrap.inner(model)) | {"saliency": saliency}


def autograd_grad_of_parameters(wrap, rank, size):
    """torch.autograd.grad gives this rank's own gradients, and no .grad."""
    model = wrap(linear())
    own = torch.autograd.grad(model(x(rank)).sum(), list(wrap.inner(model).parameters()))
    before = grads(wrap.inner(model), "before")
    model(x(rank)).sum().backward()
    return grads(wrap.inner(model)) | before | {"own": own[0]}


def backward_with_inputs(wrap, rank, size):
    """backward(inputs=...) reaches one parameter of two."""
    module = nn.Sequential(linear(2.0), nn.Linear(1, 1, bias=False))
    nn.init.constant_(module[1].weight, 3.0)
    model = wrap(module, find_unused_parameters=True)
    own = wrap.inner(model)
    model(x(rank)).sum().backward(inputs=[own[0].weight, own[1].weight])
    return grads(own)


SITUATIONS = [
    row(plain_step, right=lambda rank, size: gradient(size)),
    row(eval_backward, right=lambda rank, size: gradient(size)),
    row(eval_of_the_inner_module, right=lambda rank, size: gradient(size)),
    row(eval_after_training_and_back),
    row(validation_of_one_rank_of_the_inner_module_with_grad),
    row(inference_mode_between_steps),
    row(no_grad_in_train_mode_between_steps),
    row(set_grad_enabled_inside_the_forward),
    row(enable_grad_inside_no_grad, right=lambda rank, size: gradient(size)),
    row(autograd_grad_of_inputs_only, right=lambda rank, size: gradient(size)),
    row(autograd_grad_of_parameters, right=lambda rank, size: gradient(size)),
    row(backward_with_inputs),
]
