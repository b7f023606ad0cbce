"""Situations around a step, under every algorithm.

Weights and state are those of the same algorithm in the plain way, to the bit, or an error names
the cause.
"""

import pytest
import torch
import torch.distributed as dist
from support import training
from support.every_algorithm import ALGORITHMS, LOCAL, OWN_WEIGHTS, SYNCHRONOUS, wrapped
from torch import nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

STEPS = 6
GRADIENTS = [name for name in SYNCHRONOUS if name not in OWN_WEIGHTS]
#: Those that leave gradients and steps to the rank.
TRAIN_BY_THEMSELVES = ["async", *LOCAL]
#: One of each way to communicate. Exact gradients are compared with torch in situations/.
COMPARED = [
    "decentralized-shift-one",
    "low_precision_decentralized",
    "diloco-streaming",
    "qadam",
    "power_sgd",
]
#: Those that read or keep something of what .grad holds after the round.
KEEP_GRADIENTS = [name for name in GRADIENTS if name != "qadam"]


class Returns(nn.Module):
    """Returns its parameter and its input besides the output; may compute it twice."""

    def __init__(self):
        super().__init__()
        self.layers = training.network()
        self.more = self.recomputes = False

    def forward(self, x):
        if self.recomputes:
            x = x.detach().requires_grad_()
            return (checkpoint(self.layers, x, use_reentrant=True),)
        output = self.layers(x)
        return (output, self.layers[0].weight, x) if self.more else (output,)


class UsesNotAll(Returns):
    """Has a layer that no forward uses."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


def plain(model, optimizer, step):
    data, target = training.batch(step, dist.get_rank())
    optimizer.zero_grad()
    nn.functional.mse_loss(model(data)[0], target).backward()
    optimizer.step()


def data_of_gradients_replaced(model, optimizer, step):
    data, target = training.batch(step, dist.get_rank())
    optimizer.zero_grad()
    nn.functional.mse_loss(model(data)[0], target).backward()
    for parameter in model.layers.parameters():
        parameter.grad.data = parameter.grad.data * 1.0
    optimizer.step()


kept = []


def gradients_kept(model, optimizer, step):
    before = [(gradient, gradient.clone()) for gradient in kept]
    plain(model, optimizer, step)
    for gradient, copy in before:
        assert torch.equal(gradient, copy)
    kept[:] = [view for p in model.layers.parameters() for view in (p.grad, p.grad.view(-1))]


def gradients_of_the_users(model, optimizer, step):
    data, target = training.batch(step, dist.get_rank())
    own = [torch.zeros_like(p) for p in model.layers.parameters()]
    for parameter, gradient in zip(model.layers.parameters(), own, strict=True):
        parameter.grad = gradient
    nn.functional.mse_loss(model(data)[0], target).backward()
    for parameter, gradient in zip(model.layers.parameters(), own, strict=True):
        assert torch.equal(parameter.grad, gradient)
    optimizer.step()


def returned_parameter(model, optimizer, step):
    model.more = True
    plain(model, optimizer, step)


def other_forwards(model, optimizer, step):
    """Without a backward on one rank, without gradients, and with those of this rank alone."""
    if step in (1, 2) and dist.get_rank() == 0:
        model(training.batch(step, 0)[0])
    with torch.no_grad():
        model(training.batch(step, 0)[0])
    with model.no_sync():
        model(training.batch(step, 9)[0])[0].sum().backward()
    plain(model, optimizer, step)


def recomputed(model, optimizer, step):
    model.recomputes = True
    plain(model, optimizer, step)


def another_model_trains_through_it_while_it_is_frozen(model, optimizer, step):
    """A generator's step through a discriminator."""
    model.requires_grad_(False)
    generated = torch.full((2, training.FEATURES), float(step), requires_grad=True)
    model(generated)[0].sum().backward()
    assert generated.grad is not None
    model.requires_grad_(True)
    plain(model, optimizer, step)


SITUATIONS = [
    data_of_gradients_replaced,
    gradients_kept,
    gradients_of_the_users,
    returned_parameter,
    other_forwards,
    recomputed,
    another_model_trains_through_it_while_it_is_frozen,
]


def train(name, situation, **arguments):
    torch.manual_seed(0)
    model, optimizer = wrapped(name, UsesNotAll(), **arguments)
    kept.clear()
    for step in range(STEPS):
        situation(model, optimizer, step)
    return model


def result(model):
    """Digests of the weights and gradients of used layers, and of the algorithm's state."""
    leaves, _ = _pytree.tree_flatten(model.bagua_algorithm.state_dict())
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return training.model_bits(model.layers), training.bits(tensors), others


@training.with_group
def compare(name):
    """The situations whose result differs from the plain training's, or parts the ranks."""
    expected = result(train(name, plain))
    different = []
    for situation, arguments in [
        *((situation, {}) for situation in SITUATIONS),
        (plain, {"find_unused_parameters": True}),
        (recomputed, {"find_unused_parameters": True}),
        *((situation, {"do_flatten": False}) for situation in [plain, gradients_kept]),
        *((situation, {"do_flatten": False}) for situation in [other_forwards, recomputed]),
    ]:
        model = train(name, situation, **arguments)
        if result(model) != expected:
            different.append((situation.__name__, *arguments))
        elif model.bagua_algorithm.traits.ranks_agree:
            training.assert_ranks_agree(model)
    return different


@pytest.mark.parametrize("name", COMPARED)
def test_no_situation_changes_the_trained_weights(ranks, name):
    assert ranks(3, compare, name, env=training.SMALL_BUCKETS) == [[]] * 3


def step_in_a_hook(model):
    for parameter in model.parameters():

        def step(p):
            with torch.no_grad():
                p -= 0.1 * p.grad
            p.grad = None

        parameter.register_post_accumulate_grad_hook(step)


@training.with_group
def refuse(name):
    """The errors of a parameter in two wrapped modules, and of hooks that step."""
    trunk = nn.Linear(training.FEATURES, training.OUTPUTS)
    first, _ = wrapped(name, nn.Sequential(trunk))
    errors = [training.error_of(lambda: wrapped(name, nn.Sequential(trunk)))]
    model, optimizer = wrapped(name, Returns())
    step_in_a_hook(model)
    if name not in TRAIN_BY_THEMSELVES:
        errors.append(training.error_of(lambda: plain(model, optimizer, 0)))
    first.bagua_ddp.close()
    wrapped(name, nn.Sequential(trunk))
    return errors


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shared_parameters_and_hooks_that_step_are_refused_by_name(ranks, name):
    for errors in ranks(2, refuse, name):
        assert "parameter '0.weight' belongs to module 'Sequential' too" in errors[0]
        if name not in TRAIN_BY_THEMSELVES:
            assert "was changed while backward ran: a hook on it" in errors[1]


@training.with_group
def step_in_backward(name):
    from torch.distributed.optim import _apply_optimizer_in_backward

    def train_once(in_backward):
        model = Returns()
        optimizer = training.sgd(model)
        if in_backward:
            _apply_optimizer_in_backward(
                torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9}
            )
        registered, arguments = ALGORITHMS[name]
        model.with_bagua([optimizer], training.Algorithm.init(registered, **arguments))
        for step in range(STEPS):
            data, target = training.batch(step, dist.get_rank())
            nn.functional.mse_loss(model(data)[0], target).backward()
            if not in_backward:
                optimizer.step()
                optimizer.zero_grad()
        training.assert_ranks_agree(model)
        return training.model_bits(model)

    return train_once(False) == train_once(True)


@pytest.mark.parametrize("name", KEEP_GRADIENTS)
def test_optimizers_applied_in_backward_step_with_the_communicated_gradient(ranks, name):
    assert ranks(2, step_in_backward, name) == [True, True]
