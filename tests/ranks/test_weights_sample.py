"""By default each round compares a sample of the weights: only ranks that drift apart raise."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DecentralizedAlgorithm, GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import every_algorithm, training
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

AGREE = ["gradient_allreduce", "bytegrad-feedback", "qadam"]


def wrapped(algorithm, model=None):
    model = training.network(seed=dist.get_rank()) if model is None else model
    optimizer = training.sgd(model)
    return model.with_bagua([optimizer], algorithm), optimizer


def one_step(model, optimizer, number):
    training.train(model, optimizer, [training.batch(number, dist.get_rank())])


def next_up(tensor, index):
    """The smallest change that a value can have."""
    with torch.no_grad():
        flat = tensor.view(-1)
        flat[index] = torch.nextafter(flat[index], torch.tensor(torch.inf))


def first_error(model, optimizer, steps, before_step):
    """(number of the step, message) of the first error; None if there is none."""
    for number in range(1, steps + 1):
        before_step(number)
        try:
            one_step(model, optimizer, number)
        except RuntimeError as error:
            return number, f"{type(error).__name__}: {error}"
    return None


@training.with_group
def change(culprit, model_of, name, index, when, steps, by=None):
    """One rank changes one element before step ``when``: ``by`` so much, or to the next value."""
    model, optimizer = wrapped(GradientAllReduceAlgorithm(), model_of())
    optimizer.param_groups[0]["lr"] = 0.001  # a wide model would end in NaN, which has one pattern

    def before_step(number):
        if number == when and dist.get_rank() == culprit:
            values = dict(model.named_parameters())[name].data
            next_up(values, index) if by is None else values.view(-1)[index].add_(by)

    return first_error(model, optimizer, steps, before_step)


def small():
    return training.network(seed=dist.get_rank())


def large():
    """A hundred windows."""
    width = 330
    layers = [nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_one_bit_on_one_rank_is_found_at_the_next_step_of_a_small_model(ranks, culprit):
    camps = {
        0: "rank 0 against ranks 1, 2",
        1: "ranks 0, 2 against rank 1",
        2: "ranks 0, 1 against rank 2",
    }[culprit]
    results = ranks(3, change, culprit, small, "2.weight", 4, 5, 9)
    for rank, (step, message) in enumerate(results):
        assert step == 5
        start = f"BaguaMismatchError: module 'Sequential', rank {rank} of 3, round 5: ranks hold"
        assert message.startswith(start)
        assert f"First difference: '2.weight' ({camps}). Since" in message
        assert "Since these were compared last, 1 round(s) before, something" in message
        assert "BAGUA_CHECK_WEIGHTS_EVERY=0 turns that off" in message


@pytest.mark.parametrize("name", ["0.bias", "2.weight", "4.bias"])
def test_a_change_is_found_within_a_hundred_steps_of_a_large_model(ranks, name):
    results = ranks(2, change, 1, large, name, 2, 7, 107, 0.01)
    steps = {step for step, _ in results}
    assert len(steps) == 1
    assert 7 <= steps.pop() < 107
    for _, message in results:
        assert f"First difference: '{name}' (rank 0 against rank 1)" in message


def test_zero_turns_it_off(ranks):
    env = {"BAGUA_CHECK_WEIGHTS_EVERY": "0"}
    assert ranks(2, change, 1, small, "2.weight", 4, 4, 9, env=env) == [None] * 2


@pytest.mark.parametrize(("every", "last"), [(1, 7), (3, 9)])
def test_a_number_bounds_the_steps_until_a_change_is_found(ranks, every, last):
    env = {"BAGUA_CHECK_WEIGHTS_EVERY": str(every)}
    for name in ("0.bias", "2.weight", "4.bias"):
        for step, _ in ranks(2, change, 1, large, name, 2, 7, 20, 0.01, env=env):
            assert 7 <= step <= last


@training.with_group
def wrap():
    return training.error_of(lambda: wrapped(GradientAllReduceAlgorithm()))


@pytest.mark.parametrize(
    ("value", "words"),
    [("often", "'often' is not an integer"), ("-1", "must be a number of steps, or 0")],
)
def test_a_bad_value_is_refused(ranks, value, words):
    for message in ranks(2, wrap, env={"BAGUA_CHECK_WEIGHTS_EVERY": value}):
        assert message.startswith("ValueError: ")
        assert "BAGUA_CHECK_WEIGHTS_EVERY=" in message
        assert words in message


def test_ranks_with_different_values_get_an_error(ranks):
    for first, env in (("2", {"BAGUA_CHECK_WEIGHTS_EVERY": "2"}), ("unset", {})):
        for message in ranks(2, wrap, env=[env, {"BAGUA_CHECK_WEIGHTS_EVERY": "3"}]):
            assert message.startswith("BaguaMismatchError: ")
            assert f"[BAGUA_CHECK_WEIGHTS_EVERY={first}], rank 1 has" in message


@training.with_group
def train_long(name, seed):
    """Everything that a correct program may do, with all weights compared in each round."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(training.FEATURES, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model, optimizer = every_algorithm.wrapped(name, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)
    skipped = 0
    for number in range(100):
        inputs, targets = training.batch(number, dist.get_rank())
        if number % 11 == 3:  # one rank's gradients overflow: all ranks skip the step
            inputs = inputs * (torch.inf if dist.get_rank() == 0 and number < 75 else 1)
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        if number % 4 == 1:
            with model.no_sync():
                scaler.scale(training.squared_error(model, (inputs, targets))).backward()
        if number % 7 == 2:
            model.eval()
            with torch.no_grad():
                model(inputs)
            model.train()
        if number % 9 == 5:
            model(inputs)  # a forward without backward
        scaler.scale(training.squared_error(model, (inputs, targets))).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    return skipped, training.bits(model.parameters())


@pytest.mark.parametrize("name", AGREE)
def test_there_is_no_false_alarm(ranks, name):
    results = ranks(3, train_long, name, 3)
    assert len(set(results)) == 1


@training.with_group
def train_apart(how):
    model = small()
    if how == "decentralized":
        model, optimizer = wrapped(DecentralizedAlgorithm(hierarchical=False), model)
    else:
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, noop_hook)
        optimizer = training.sgd(model)
    error = first_error(model, optimizer, 5, lambda number: None)
    return error, len(set(training.gather(training.bits(model.parameters()))))


@pytest.mark.parametrize(
    ("how", "env"),
    [("decentralized", {"BAGUA_CHECK_WEIGHTS_EVERY": "1"}), ("noop_hook", {})],
    ids=["decentralized", "noop_hook"],
)
def test_where_ranks_hold_weights_of_their_own_nothing_is_compared(ranks, how, env):
    assert ranks(2, train_apart, how, env=env) == [(None, 2)] * 2


@training.with_group
def sam(drifts):
    """Sharpness-aware minimisation as its authors advise for DDP: each rank goes its own way up."""
    model, optimizer = wrapped(GradientAllReduceAlgorithm())
    for number in range(1, 9):
        data = training.batch(number, dist.get_rank())
        if drifts and number == 4 and dist.get_rank() == 1:
            next_up(model[0].bias.data, 0)
        optimizer.zero_grad()
        old = [p.detach().clone() for p in model.parameters()]
        try:
            with model.no_sync():
                training.squared_error(model, data).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=0.05)
            optimizer.zero_grad()
            training.squared_error(model, data).backward()
        except RuntimeError as error:
            return number, str(error)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), old, strict=True):
                parameter.copy_(value)
        optimizer.step()
    return training.bits(model.parameters())


def test_ranks_that_differ_for_the_time_of_a_forward_only_are_left_alone(ranks):
    assert len(set(ranks(2, sam, False))) == 1
    for step, message in ranks(2, sam, True):
        assert step == 4
        assert "ranks hold different weights" in message


@training.with_group
def start_apart():
    model = DistributedDataParallel(small(), init_sync=False)
    return first_error(model, training.sgd(model), 2, lambda number: None)


def test_different_weights_at_the_wrap_raise_at_the_first_step(ranks):
    for step, message in ranks(2, start_apart):
        assert step == 1
        assert "They differed at the wrap already (init_sync=False), or since then" in message


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(training.FEATURES, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.ignored = nn.Parameter(torch.ones(3))
        self.other_name = self.shared = nn.Parameter(torch.ones(3))
        self.expert = nn.Parameter(torch.ones(3))
        self.expert.expert = True
        self.register_buffer("mean", torch.zeros(3))
        self._bagua_params_and_buffers_to_ignore = ["ignored", "shared"]

    def forward(self, inputs):
        own = self.ignored * self.other_name * self.expert
        return self.linear(inputs) * self.frozen * own + self.mean


@training.with_group
def change_a_tensor(name):
    model, optimizer = wrapped(GradientAllReduceAlgorithm(), Mixed())

    def before_step(number):
        if number == 2 and dist.get_rank() == 1:
            next_up(dict(model.named_buffers()).get(name, model.state_dict()[name]), 1)

    return first_error(model, optimizer, 4, before_step)


@pytest.mark.parametrize("name", ["linear.bias", "frozen"])
def test_trained_and_frozen_parameters_are_compared(ranks, name):
    for step, message in ranks(2, change_a_tensor, name):
        assert step == 2
        assert f"First difference: '{name}' (rank 0 against rank 1)" in message


@pytest.mark.parametrize("name", ["ignored", "other_name", "expert", "mean"])
def test_values_that_may_differ_between_ranks_are_not_compared(ranks, name):
    assert ranks(2, change_a_tensor, name) == [None] * 2


@training.with_group
def join_unevenly(inputs, gives_optimizer, then_drift):
    rank = dist.get_rank()
    model = small()
    optimizer = training.sgd(model)
    model = DistributedDataParallel(model, optimizers=[optimizer] if gives_optimizer else [])
    for epoch in range(3 if gives_optimizer else 1):
        with model.join():
            for number in range(inputs[rank]):
                one_step(model, optimizer, 10 * epoch + number)
    assert len(set(training.gather(training.bits(model.parameters())))) == 1
    if then_drift and rank == 1:
        next_up(model.module[0].bias, 0)
    return first_error(model, optimizer, 3, lambda number: None)


@pytest.mark.parametrize("inputs", [(1, 4), (5, 2), (3, 1, 3)])
def test_rounds_of_ranks_without_inputs_compare_nothing(ranks, inputs):
    assert ranks(len(inputs), join_unevenly, inputs, True, False) == [None] * len(inputs)
    for step, message in ranks(len(inputs), join_unevenly, inputs, True, True):
        assert step == 1
        assert "First difference: '0.bias'" in message


def test_momentum_missing_on_ranks_without_inputs_is_an_error(ranks):
    for step, message in ranks(2, join_unevenly, (1, 4), False, False):
        assert step == 2
        assert "DistributedDataParallel(optimizers=...)" in message
