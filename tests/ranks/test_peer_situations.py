"""Averages with peers where steps are not plain: optimizers, buffers, skips, new buckets."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm
from bagua.torch_api.algorithms.decentralized import (
    DecentralizedAlgorithmImpl,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from ranks.test_low_precision_decentralized import (
    STEPS,
    assert_ring,
    oracle_of,
    oracle_step,
    train_step,
    weight_bits,
    wrapped,
)
from support import training
from support.every_algorithm import PEERS
from support.every_algorithm import wrapped as wrapped_by

per_algorithm = pytest.mark.parametrize("name", PEERS)


class NoisyBuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = training.network()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen += 1 + dist.get_rank()
        return self.network(inputs)


@training.with_group
def train_with_buffers(name):
    model, optimizer = wrapped_by(name, NoisyBuffer())
    for step in range(2):
        train_step(model, optimizer, step)
    return model.seen.item()


@per_algorithm
def test_buffers_stay_each_ranks_own(ranks, name):
    assert ranks(2, train_with_buffers, name) == [2.0, 4.0]


@training.with_group
def step_between_forward_and_backward(name):
    model, optimizer = wrapped_by(name, training.network())
    inputs, _ = training.batch(0, dist.get_rank())
    model(inputs).sum().backward()
    model(inputs)
    return training.error_of(optimizer.step, bagua.BaguaError)


@per_algorithm
def test_a_step_while_weights_are_on_their_way_raises_and_says_what_to_do(ranks, name):
    for message in ranks(2, step_between_forward_and_backward, name):
        assert "'Sequential': optimizer.step() came between a training forward" in message
        assert "eval()" in message


@training.with_group
def leave_early(name):
    model, optimizer = wrapped_by(name, training.network())
    train_step(model, optimizer, 0)
    if dist.get_rank() == 1:
        return "left"
    return training.error_of(lambda: train_step(model, optimizer, 1), bagua.BaguaError)


@per_algorithm
def test_a_rank_that_exits_early_is_an_error_on_the_others(ranks, name):
    first, left, third = ranks(3, leave_early, name)
    assert left == "left"
    assert "rank 1 exited after 1 rounds" in first
    assert "rank 1 exited after 1 rounds" in third


def rebucketed(implementation):
    """An algorithm that asks for new buckets at its fourth forward."""

    class Rebucketed(implementation):
        asked = 0

        def need_reset(self):
            self.asked += 1
            return self.asked == 4

    return training.Own(Rebucketed, False)


@training.with_group
def rebucket(implementation):
    """New buckets come with rank 0's weights on all ranks: a ring's replicas restart from these."""
    model = training.network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], rebucketed(implementation))
    for step in range(STEPS):
        if step == 2 and dist.get_rank() == 1:  # and a round that is due before them
            training.squared_error(model, training.batch(9, 1)).backward()
        elif step == 2:
            train_step(model, optimizer, 9)
        train_step(model, optimizer, step)
        if implementation is LowPrecisionDecentralizedAlgorithmImpl:
            assert assert_ring(model) == 2
    return model.bagua_algorithm.state_dict()["iterations"]


@pytest.mark.parametrize(
    "implementation", [DecentralizedAlgorithmImpl, LowPrecisionDecentralizedAlgorithmImpl]
)
def test_counters_and_the_ring_survive_new_buckets(ranks, implementation):
    assert ranks(2, rebucket, implementation) == [STEPS + 1] * 2


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
    values = {v.item() for p in model.parameters() for v in p.flatten()}
    return skipped, values, len(model.bagua_buckets)


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_a_skipped_step_on_one_rank_and_several_dtypes_change_nothing(ranks, mode):
    for rank, (skipped, values, buckets) in enumerate(ranks(2, skip_on_one_rank, mode)):
        assert skipped == [False, rank == 0, False]
        assert values == {1.0}, "the mean of 0 and 2"
        assert buckets == 2


def two_optimizers(model):
    first, _, last = model
    return [
        torch.optim.SGD(first.parameters(), lr=0.1),
        torch.optim.AdamW(last.parameters(), lr=0.01, foreach=False),
    ]


@training.with_group
def train_with_two_optimizers():
    model = training.network()
    expected = oracle_of(model, two_optimizers)
    other = torch.nn.Linear(1, 1)
    unrelated = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizers = two_optimizers(model)
    model.with_bagua([*optimizers, unrelated], LowPrecisionDecentralizedAlgorithm(False))
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        training.squared_error(model, training.batch(step, dist.get_rank())).backward()
        sent = []
        for optimizer in [*optimizers, optimizers[0]][step % 2 :][:2]:  # in either order
            optimizer.step()
            sent.append(model.bagua_stats()["total"]["bytes_sent"])
        result = oracle_step(expected, step)
        assert weight_bits(model) == weight_bits(result), f"step {step}"
        assert sent[0] < sent[1], "the round comes after the last of them"
        assert sent[0] == step * sent[1] / (step + 1)
        assert_ring(model)


def test_with_two_optimizers_the_round_comes_after_the_last_one(ranks):
    ranks(2, train_with_two_optimizers)


@training.with_group
def wrap_without_an_optimizer():
    model = training.network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    return training.error_of(
        lambda: model.with_bagua([optimizer], LowPrecisionDecentralizedAlgorithm(False))
    )


def test_a_parameter_that_no_optimizer_has_is_named(ranks):
    for message in ranks(2, wrap_without_an_optimizer):
        assert message.startswith("RuntimeError: module 'Sequential': parameters ['2.weight', '2.b")
        assert "none of the optimizers given to with_bagua" in message


@training.with_group
def accumulate_without_no_sync():
    """Two iterations, one step: both are rounds, and the ring holds."""
    model = training.network()
    (optimizer,) = wrapped(model)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            data = training.batch(2 * step + part, dist.get_rank())
            training.squared_error(model, data).backward()
        optimizer.step()
        assert_ring(model)
    return model.bagua_algorithm.state_dict()["iterations"], model.bagua_stats()["rounds"]


def test_every_backward_is_an_iteration_and_a_round(ranks):
    assert ranks(2, accumulate_without_no_sync) == [(6, 6)] * 2
