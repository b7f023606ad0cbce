"""Low-precision decentralized SGD in odd situations: optimizers, forwards, models, new buckets."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms.decentralized import (
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from ranks.test_decentralized_situations import NoisyBuffer, OddPaths
from ranks.test_low_precision_decentralized import (
    STEPS,
    assert_ring,
    optimizers_of,
    oracle_of,
    oracle_step,
    train_step,
    weight_bits,
    wrapped,
)
from support import training


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
def train_with_other_forwards():
    """A forward without backward on one rank, accumulation and eval forwards: as without them."""
    model = training.network()
    expected = oracle_of(model, interval=2)
    optimizers = wrapped(model, 2)
    for step in range(STEPS):
        if step in (1, 2) and dist.get_rank() == 0:
            model(training.batch(step, 0)[0])
        with torch.no_grad():
            model(training.batch(step, 0)[0])
        with model.no_sync():
            training.squared_error(model, training.batch(step, 9)).backward()
        train_step(model, optimizers, step)
        assert weight_bits(model) == weight_bits(oracle_step(expected, step)), f"step {step}"
        assert_ring(model)
    return model.bagua_algorithm.state_dict()["iterations"], model.bagua_stats()["rounds"]


def test_forwards_without_a_synchronising_backward_are_no_iterations(ranks):
    assert ranks(3, train_with_other_forwards) == [(STEPS, 3)] * 3


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


@training.with_group
def step_between_forward_and_backward():
    model = training.network()
    (optimizer,) = wrapped(model)
    inputs, _ = training.batch(0, dist.get_rank())
    model(inputs).sum().backward()
    model(inputs)
    return training.error_of(optimizer.step, bagua.BaguaError)


def test_a_step_between_forward_and_backward_raises_and_says_what_to_do(ranks):
    for message in ranks(2, step_between_forward_and_backward):
        assert "'Sequential': optimizer.step() came between a training forward" in message
        assert "eval()" in message


@training.with_group
def train_odd_paths(find_unused):
    model = OddPaths()
    expected = oracle_of(model)
    optimizers = wrapped(model, find_unused_parameters=find_unused)
    for step in range(STEPS):
        train_step(model, optimizers, step)
        assert weight_bits(model) == weight_bits(oracle_step(expected, step)), f"step {step}"
        assert_ring(model)


@pytest.mark.parametrize("find_unused", [False, True], ids=["plain", "find-unused"])
def test_checkpoints_and_unused_parameters_are_mixed_as_any_other(ranks, find_unused):
    ranks(3, train_odd_paths, find_unused)


@training.with_group
def train_in_small_buckets():
    model = training.network()
    optimizers = wrapped(model)
    for step in range(STEPS):
        train_step(model, optimizers, step)
        assert_ring(model)
    return len(model.bagua_buckets)


def test_every_bucket_keeps_its_replicas(ranks):
    assert ranks(3, train_in_small_buckets, env=training.SMALL_BUCKETS) == [4] * 3


@training.with_group
def train_with_buffers():
    model = NoisyBuffer()
    optimizers = wrapped(model)
    for step in range(2):
        train_step(model, optimizers, step)
    return model.seen.item()


def test_buffers_stay_each_ranks_own(ranks):
    assert ranks(2, train_with_buffers) == [2.0, 4.0]


@training.with_group
def leave_early():
    model = training.network()
    optimizers = wrapped(model)
    train_step(model, optimizers, 0)
    if dist.get_rank() == 1:
        return "left"
    return training.error_of(lambda: train_step(model, optimizers, 1), bagua.BaguaError)


def test_a_rank_that_exits_early_is_an_error_on_the_others(ranks):
    first, left, third = ranks(3, leave_early)
    assert left == "left"
    assert "rank 1 exited after 1 rounds" in first
    assert "rank 1 exited after 1 rounds" in third


class Rebucketed(LowPrecisionDecentralizedAlgorithmImpl):
    asked = 0

    def need_reset(self):
        self.asked += 1
        return self.asked == 3


@training.with_group
def rebucket():
    """New buckets come with rank 0's weights on all ranks: the replicas restart from these."""
    model = training.network()
    optimizers = optimizers_of(model)
    model.with_bagua(optimizers, training.Own(Rebucketed, False))
    for step in range(STEPS):
        if step == 2 and dist.get_rank() == 1:  # and a round that is due before them
            training.squared_error(model, training.batch(9, 1)).backward()
        elif step == 2:
            train_step(model, optimizers, 9)
        train_step(model, optimizers, step)
        assert assert_ring(model) == 2
    return model.bagua_algorithm.state_dict()["iterations"]


def test_new_buckets_keep_the_ring_and_the_counters(ranks):
    assert ranks(2, rebucket) == [STEPS + 1] * 2
