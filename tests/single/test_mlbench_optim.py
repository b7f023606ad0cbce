"""Optimizers of mlbench_core in one process, against torch's."""

import copy
import functools
import pickle

import pytest
import torch
from mlbench_core.optim.pytorch import (
    CentralizedAdam,
    CentralizedSGD,
    CustomCentralizedOptimizer,
    DecentralizedSGD,
    GenericCentralizedOptimizer,
    SignSGD,
    SparsifiedSGD,
    get_optimizer,
    optimizers,
)
from mlbench_core.optim.pytorch.fp_optimizers import FP16Optimizer
from support.training import batch, model_bits, network, squared_error, train
from torch import nn

STEPS = 4
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
ADAM = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True}


def data(first=0, steps=STEPS):
    return [batch(step, 0) for step in range(first, first + steps)]


def custom(model, **options):
    inner = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)
    return CustomCentralizedOptimizer(model, 1, inner, average_world=True, **options)


def decentralized(model, **options):
    return DecentralizedSGD(0, [], model, **options)


# Ours, and torch's that it must equal to the bit where there is one rank.
PAIRS = {
    "sgd": (functools.partial(CentralizedSGD, 1, **SGD), functools.partial(torch.optim.SGD, **SGD)),
    "sgd_dampening": (
        functools.partial(CentralizedSGD, 1, lr=0.1, momentum=0.9, dampening=0.5),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    ),
    "sgd_of_weights": (
        functools.partial(CentralizedSGD, 1, lr=0.1, agg_grad=False),
        functools.partial(torch.optim.SGD, lr=0.1),
    ),
    "adam": (
        functools.partial(CentralizedAdam, 1, **ADAM),
        functools.partial(torch.optim.Adam, **ADAM),
    ),
    "adam_default": (functools.partial(CentralizedAdam, 1), torch.optim.Adam),
    "custom": (custom, functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5)),
    "decentralized": (
        functools.partial(decentralized, **SGD),
        functools.partial(torch.optim.SGD, **SGD),
    ),
}
every_pair = pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS.keys())
every_one = pytest.mark.parametrize("make", [ours for ours, _ in PAIRS.values()], ids=PAIRS.keys())


def on_torch(theirs, model):
    return theirs(model.parameters())


@every_pair
def test_alone_it_is_torchs_optimizer(ours, theirs):
    model, oracle = network(), network()
    train(model, ours(model=model), data())
    train(oracle, on_torch(theirs, oracle), data())
    assert model_bits(model) == model_bits(oracle)


@every_pair
def test_schedulers_of_learning_rates_work_on_it(ours, theirs):
    weights = []
    for make in (lambda model: ours(model=model), lambda model: on_torch(theirs, model)):
        model = network()
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        first_rate = optimizer.param_groups[0]["lr"]
        train(model, optimizer, data(), after_step=lambda _, s=scheduler: s.step())
        assert optimizer.param_groups[0]["lr"] == first_rate * 0.5**STEPS
        weights.append(model_bits(model))
    assert weights[0] == weights[1]


@every_one
def test_a_restored_optimizer_goes_on_to_the_bit(make):
    model = network()
    optimizer = make(model=model)
    train(model, optimizer, data())
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, data(STEPS))
    other = network(1)
    restored = make(model=other)
    other.load_state_dict(saved[0])
    restored.load_state_dict(saved[1])
    train(other, restored, data(STEPS))
    assert model_bits(other) == model_bits(model)


@every_one
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_goes_on_to_the_bit_and_leaves_the_original_alone(make, copied):
    model = network()
    optimizer = make(model=model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, data())
    scheduler.step()
    twin, twin_optimizer = copied((model, optimizer))
    before = model_bits(model)
    train(twin, twin_optimizer, data(STEPS))
    assert model_bits(model) == before
    train(model, optimizer, data(STEPS))
    assert model_bits(model) == model_bits(twin) != before


def test_a_closure_is_called_before_the_aggregation():
    model, oracle = network(), network()
    for made, trained in (
        (CentralizedSGD(1, model, lr=0.1), model),
        (torch.optim.SGD(oracle.parameters(), lr=0.1), oracle),
    ):

        def closure(made=made, trained=trained):
            made.zero_grad()
            loss = squared_error(trained, batch(0, 0))
            loss.backward()
            return loss

        loss = made.step(closure)
        assert loss > 0
    assert model_bits(model) == model_bits(oracle)


class Events:
    def __init__(self):
        self.seen = []

    def record_batch_agg(self):
        self.seen.append("aggregated")

    def record_batch_opt_step(self):
        self.seen.append("stepped")


@pytest.mark.parametrize("agg_grad", [True, False])
def test_a_tracker_is_notified_in_order(agg_grad):
    model, tracker = network(), Events()
    squared_error(model, batch(0, 0)).backward()
    CentralizedSGD(1, model, lr=0.1, agg_grad=agg_grad).step(tracker=tracker)
    assert tracker.seen == ["aggregated", "stepped"][:: 1 if agg_grad else -1]


def test_groups_may_be_added_and_attributes_of_the_inner_optimizer_are_found():
    model = network()
    optimizer = CentralizedSGD(1, model[0], lr=0.1)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.3})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
    assert optimizer.optimizer.param_groups is optimizer.param_groups
    assert optimizer.zero_grad.__self__ is optimizer
    with pytest.raises(AttributeError, match="nothing_like_it"):
        optimizer.nothing_like_it  # noqa: B018


def test_a_subclass_sets_its_optimizer():
    class Own(GenericCentralizedOptimizer):
        def __init__(self, model):
            super().__init__(world_size=1, model=model)
            with pytest.raises(ValueError, match="has no optimizer yet"):
                self.step()
            self.optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    model, oracle = network(), network()
    train(model, Own(model), data())
    train(oracle, torch.optim.Adagrad(oracle.parameters(), lr=0.1), data())
    assert model_bits(model) == model_bits(oracle)


def test_gradients_are_clipped_and_divided_by_the_denominator():
    model, oracle = network(), network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = CustomCentralizedOptimizer(model, 1, inner, grad_clip=0.02, average_custom=True)
    squared_error(model, batch(0, 0)).backward()
    assert optimizer.step(denom=torch.tensor(4.0)) is True
    squared_error(oracle, batch(0, 0)).backward()
    for p in oracle.parameters():
        p.grad /= 4
    assert nn.utils.clip_grad_norm_(oracle.parameters(), 0.02) > 0.02
    torch.optim.SGD(oracle.parameters(), lr=0.1).step()
    assert model_bits(model) == model_bits(oracle)


@pytest.mark.parametrize("agg_grad", [True, False])
def test_a_missing_denominator_changes_nothing(agg_grad):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = CustomCentralizedOptimizer(model, 1, inner, average_custom=True, agg_grad=agg_grad)
    squared_error(model, batch(0, 0)).backward()
    before = model_bits(model)
    with pytest.raises(ValueError, match="denominator"):
        optimizer.step()
    assert model_bits(model) == before
    optimizer.step(denom=2.0)
    assert model_bits(model) != before


# Names and refusals.


def test_the_registry_makes_optimizers_by_name():
    assert set(optimizers) == {
        "sign_sgd",
        "sparsified_sgd",
        "centralized_sparsified_sgd",
        "centralized_sgd",
        "centralized_adam",
        "power_sgd",
        "decentralized_sgd",
    }
    made = get_optimizer("centralized_sgd", world_size=1, model=network(), lr=0.1)
    assert isinstance(made, CentralizedSGD)
    assert isinstance(made, torch.optim.Optimizer)
    with pytest.raises(KeyError, match="there is no optimizer 'sgd'; there are sign_sgd"):
        get_optimizer("sgd")


REFUSED = {
    "no world_size": (lambda m: CentralizedSGD(model=m, lr=0.1), '"world_size" not set'),
    "no model": (lambda _: CentralizedSGD(1, lr=0.1), '"model" not set'),
    "no lr": (lambda m: CentralizedSGD(1, m), '"lr" not set'),
    "no rank": (lambda m: DecentralizedSGD(None, [1], m, 0.1), '"rank" not set'),
    "no neighbors": (lambda m: DecentralizedSGD(0, None, m, 0.1), '"neighbors" not set'),
    "own neighbor": (lambda m: DecentralizedSGD(0, [0], m, 0.1), "own list of neighbours"),
    "no params": (lambda _: SparsifiedSGD(lr=0.1), '"params" not set'),
    "no coordinates": (
        lambda m: SparsifiedSGD(m.parameters(), lr=0.1, sparse_grad_size=0),
        "sparse_grad_size=0",
    ),
    "negative lr": (lambda m: SparsifiedSGD(m.parameters(), lr=-1), "must not be negative"),
    "sign without lr": (lambda m: SignSGD(m.parameters()), '"lr" not set'),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(network())


@pytest.mark.parametrize(
    "make",
    [
        lambda m: CustomCentralizedOptimizer(m, 1, torch.optim.SGD(m.parameters(), lr=0.1)),
        lambda m: DecentralizedSGD(0, [], m, 0.1, average_world=False),
        lambda m: FP16Optimizer(m, 1),
    ],
    ids=["custom", "decentralized", "fp16"],
)
def test_an_average_must_be_chosen(make):
    with pytest.raises(NotImplementedError, match="average"):
        make(network())
