"""A module that bagua and torch would both synchronise is refused, in whichever order they wrap."""

import pytest
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import training
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel as TorchDDP

AVERAGED_TWICE = "is averaged by torch's DistributedDataParallel or replicate() too"


def by_bagua(model):
    return model.with_bagua([training.sgd(model)], GradientAllReduceAlgorithm())


def step(model):
    training.squared_error(model, training.batch(0, dist.get_rank())).backward()


def step_in_eval(model):
    step(model.eval())


def around_a_child(model):
    by_bagua(model[2])
    return TorchDDP(model)


#: Wrappers of which the second, or the first step, must raise; the parameter that is named.
ORDERS = {
    "torch around with_bagua": (lambda m: TorchDDP(by_bagua(m)), step, "0.weight"),
    "torch around with_bagua, eval": (lambda m: TorchDDP(by_bagua(m)), step_in_eval, "2.bias"),
    "torch around the class": (lambda m: TorchDDP(DistributedDataParallel(m)), step, "0.weight"),
    "torch around a child": (around_a_child, step, "weight"),
    "replicate() of with_bagua": (lambda m: replicate(by_bagua(m)), step, "2.bias"),
    "with_bagua of replicate()": (lambda m: by_bagua(replicate(m)), step, "0.weight"),
}


@training.with_group
def wrap_and_step(order):
    wrap, first_step, _ = ORDERS[order]
    model = wrap(training.network())
    message = training.error_of(lambda: first_step(model))
    return message, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("order", ORDERS)
def test_the_first_step_under_two_wrappers_raises(ranks, order):
    for message, gradients in ranks(2, wrap_and_step, order):
        assert message.startswith("BaguaError: ")
        assert f"the gradient of parameter '{ORDERS[order][2]}' {AVERAGED_TWICE}" in message
        assert "Wrap the module once, by bagua or by torch" in message
        if ORDERS[order][2] != "2.bias":  # refused in the forward already
            assert gradients == [None] * 4


def refusals_inside(outer):
    return [
        training.error_of(lambda: by_bagua(outer.module)),
        training.error_of(lambda: by_bagua(outer)),
        training.error_of(lambda: by_bagua(outer.module[2])),
        training.error_of(lambda: DistributedDataParallel(outer.module)),
        training.error_of(lambda: DistributedDataParallel(outer)),
    ]


@training.with_group
def wrap_inside_torchs():
    network = training.network()
    refusals = refusals_inside(TorchDDP(network))
    by_bagua(network)
    training.train_on_ranks(network, training.sgd(network))
    return refusals


def test_a_module_inside_torchs_wrapper_is_refused_at_the_wrap_until_that_is_gone(ranks):
    for refusals in ranks(2, wrap_inside_torchs):
        names = ["0.weight", "module.0.weight", "weight", "0.weight", "module.0.weight"]
        for refusal, name in zip(refusals, names, strict=True):
            assert refusal.startswith("RuntimeError: module '")
            assert f"the gradient of parameter '{name}' {AVERAGED_TWICE}" in refusal


@training.with_group
def share_the_work():
    """torch's wrapper is told to leave the parameters of the wrapped child alone."""
    network = training.network()
    alone = training.network()
    by_bagua(network[2])
    network._ddp_params_and_buffers_to_ignore = ["2.weight", "2.bias"]
    model, optimizer = TorchDDP(network), training.sgd(network)
    training.train_on_ranks(model, optimizer)
    training.assert_close(network, training.train_alone(alone, training.sgd(alone)))


def test_torch_may_synchronise_the_other_parameters(ranks):
    ranks(3, share_the_work)


@training.with_group
def wrap_by_bagua_twice():
    wrapped = by_bagua(training.network())
    outer = nn.Sequential(wrapped)
    return (
        training.error_of(lambda: DistributedDataParallel(wrapped)),
        training.error_of(lambda: by_bagua(outer)),
        training.error_of(lambda: by_bagua(DistributedDataParallel(training.network()))),
    )


def test_two_wrappers_of_bagua_are_refused_at_the_wrap(ranks):
    for around, contains, of_the_class in ranks(2, wrap_by_bagua_twice):
        assert "is wrapped already, by bagua.wrap; wrap it once" in around
        assert "parameter '0.0.weight' belongs to module 'Sequential' too" in contains
        assert "this is a DistributedDataParallel already" in of_the_class
