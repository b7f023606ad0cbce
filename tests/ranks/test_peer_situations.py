"""Averages with peers where steps are not plain: optimizers, buffers, skips, new buckets."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm
from ranks.test_low_precision_decentralized import (
    STEPS,
    Mixed,
    assert_ring,
    oracle_of,
    oracle_step,
    train_step,
    weight_bits,
)
from support import training
from support.every_algorithm import PEERS, wrapped as wrapped_by

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
def skip_on_one_rank(mode):
    """The means that ranks hold after a step that a GradScaler skips on rank 0 alone."""
    model = Mixed([torch.bfloat16])
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
        assert "none of the optimizers given to bagua.wrap" in message
