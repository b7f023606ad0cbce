"""Decentralized SGD when steps are not plain: other forwards, odd models, new buckets."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms.decentralized import (
    DecentralizedAlgorithm,
    DecentralizedAlgorithmImpl,
)
from ranks.test_decentralized import MODE, STEPS, oracle_of, oracle_step, train_step
from support import training
from torch.utils.checkpoint import checkpoint


class NoisyBuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = training.network()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen += 1 + dist.get_rank()
        return self.network(inputs)


@training.with_group
def train_with_buffers():
    model = NoisyBuffer()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], DecentralizedAlgorithm(False))
    for step in range(2):
        train_step(model, optimizer, step)
    return model.seen.item()


def test_buffers_stay_each_ranks_own(ranks):
    assert ranks(2, train_with_buffers) == [2.0, 4.0]


@training.with_group
def train_with_other_forwards():
    """A forward without backward on one rank, accumulation and eval forwards: as without them."""
    model = training.network()
    expected = oracle_of(model, "shift_one", 2)
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], DecentralizedAlgorithm(False, "shift_one", 2))
    for step in range(STEPS):
        if step in (1, 2) and dist.get_rank() == 0:
            model(training.batch(step, 0)[0])
        with torch.no_grad():
            model(training.batch(step, 0)[0])
        with model.no_sync():
            training.squared_error(model, training.batch(step, 9)).backward()
        train_step(model, optimizer, step)
        training.assert_close(model, oracle_step(expected, step))
    return model.bagua_algorithm.state_dict()


def test_forwards_without_a_synchronising_backward_are_no_iterations(ranks):
    assert ranks(3, train_with_other_forwards) == [{"iterations": 5, "communications": 3}] * 3


@training.with_group
def step_between_forward_and_backward():
    model = training.network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], DecentralizedAlgorithm(False))
    inputs, _ = training.batch(0, dist.get_rank())
    model(inputs).sum().backward()
    model(inputs)
    return training.error_of(optimizer.step, bagua.BaguaError)


def test_a_step_while_weights_are_on_their_way_raises_and_says_what_to_do(ranks):
    for message in ranks(2, step_between_forward_and_backward):
        assert "'Sequential': optimizer.step() came between a training forward" in message
        assert "eval()" in message


class OddPaths(torch.nn.Module):
    """A part under a reentrant checkpoint, another that is not used."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(training.FEATURES, training.FEATURES)
        self.network = training.network()
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, inputs):
        return checkpoint(self.network, self.first(inputs), use_reentrant=True)


@training.with_group
def train_odd_paths(interval):
    model = OddPaths()
    expected = oracle_of(model, "shift_one", interval)
    optimizer = training.sgd(model)
    chosen = DecentralizedAlgorithm(False, "shift_one", interval)
    model.with_bagua([optimizer], chosen, find_unused_parameters=True)
    for step in range(STEPS):
        train_step(model, optimizer, step)
        training.assert_close(model, oracle_step(expected, step))
    return model.bagua_algorithm.state_dict()["iterations"]


@pytest.mark.parametrize("interval", [1, 2])
def test_checkpoints_and_unused_parameters_are_averaged_as_any_other(ranks, interval):
    assert ranks(3, train_odd_paths, interval) == [STEPS] * 3


@training.with_group
def leave_early():
    model = training.network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], DecentralizedAlgorithm(False, "shift_one"))
    train_step(model, optimizer, 0)
    if dist.get_rank() == 1:
        return "left"
    return training.error_of(lambda: train_step(model, optimizer, 1), bagua.BaguaError)


def test_a_rank_that_exits_early_is_an_error_on_the_others(ranks):
    first, left, third = ranks(3, leave_early)
    assert left == "left"
    assert "rank 1 exited after 1 rounds" in first
    assert "rank 1 exited after 1 rounds" in third


class Rebucketed(DecentralizedAlgorithmImpl):
    asked = 0

    def need_reset(self):
        self.asked += 1
        return self.asked == 2


@training.with_group
def rebucket():
    model = training.network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], training.Own(Rebucketed, False, "shift_one"))
    for step in range(3):
        train_step(model, optimizer, step)
    return model.bagua_algorithm.state_dict()


def test_counters_survive_new_buckets(ranks):
    assert ranks(2, rebucket) == [{"iterations": 3, "communications": 3}] * 2


class Mixed(torch.nn.Module):
    """Layers of two dtypes: two buckets."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 4), torch.nn.Linear(4, 3).bfloat16()

    def forward(self, inputs):
        return self.second(self.first(inputs).bfloat16()).float()


@training.with_group
def skip_on_one_rank(mode):
    """The means that ranks hold after a step that a GradScaler skips on rank 0 alone."""
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.with_bagua([optimizer], DecentralizedAlgorithm(False, mode))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(2.0 * dist.get_rank())
    skipped = []
    for step in range(3):
        optimizer.zero_grad()
        loss = training.squared_error(model, training.batch(step, dist.get_rank()))
        overflows = step == 1 and dist.get_rank() == 0
        scaler.scale(loss * float("inf") if overflows else loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < before)
    return (
        skipped,
        {v.item() for p in model.parameters() for v in p.flatten()},
        len(model.bagua_buckets),
    )


@MODE
def test_a_skipped_step_on_one_rank_and_several_dtypes_change_nothing(ranks, mode):
    for rank, (skipped, values, buckets) in enumerate(ranks(2, skip_on_one_rank, mode)):
        assert skipped == [False, rank == 0, False]
        assert values == {1.0}, "the mean of 0 and 2"
        assert buckets == 2
