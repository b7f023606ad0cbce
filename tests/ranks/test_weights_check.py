"""BAGUA_CHECK_WEIGHTS_EVERY=k: ranks that drift apart are found, and no others."""

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DecentralizedAlgorithm, GradientAllReduceAlgorithm
from support import training
from torch import nn

EVERY = {"BAGUA_CHECK_WEIGHTS_EVERY": "3"}


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


@training.with_group
def change_one_bit(culprit, steps):
    """(step, message) of the error that this rank got, and how many bytes the check sent."""
    model, optimizer = wrapped(GradientAllReduceAlgorithm())
    found = None
    for number in range(1, steps + 1):
        try:
            one_step(model, optimizer, number)
        except RuntimeError as error:
            found = number, f"{type(error).__name__}: {error}"
            break
        if number == 3 and dist.get_rank() == culprit:
            next_up(model[2].weight, 4)
    communicators = model.bagua_stats()["communicators"]
    return found, communicators.get("check", {"bytes_sent": 0})["bytes_sent"]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_one_bit_on_one_rank_is_found_at_the_next_check_on_all_ranks(ranks, culprit):
    results = ranks(3, change_one_bit, culprit, 9, env=EVERY)
    others = [rank for rank in range(3) if rank != culprit]
    camps = {
        0: f"rank 0 against ranks {others[0]}, {others[1]}",
        1: "ranks 0, 2 against rank 1",
        2: "ranks 0, 1 against rank 2",
    }[culprit]
    for found, sent in results:
        step, message = found
        assert step == 6
        assert message.startswith("BaguaMismatchError: module 'Sequential', training forward 6")
        assert f"First difference: '2.weight' ({camps}). Since" in message
        assert sent == 2 * 4 * 8 * 2  # two checks of four parameters, to two ranks


def test_without_steps_nothing_is_checked(ranks):
    env = {"BAGUA_CHECK_WEIGHTS_EVERY": "0"}
    assert ranks(3, change_one_bit, 1, 9, env=env) == [(None, 0)] * 3


@training.with_group
def train_twenty_steps(name):
    model = nn.Sequential(nn.Linear(training.FEATURES, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    wrapped(training.algorithm(name), model)
    optimizer = training.sgd(model)
    for number in range(20):
        one_step(model, optimizer, number)
        if number == 10:
            model(training.batch(0, dist.get_rank())[0])  # without backward: one round, one check
        if number % 2:
            with model.no_sync():
                training.squared_error(model, training.batch(number, dist.get_rank())).backward()
    model.eval()
    model(training.batch(0, 0)[0])
    sent = model.bagua_stats()["communicators"]
    # Six parameters at each of 20 checks, and three buffers where they have just been given to all
    # ranks: before the first forward, and where the forward before communicated.
    assert sent["check"]["bytes_sent"] == (20 * 6 + 11 * 3) * 8 * (dist.get_world_size() - 1)
    assert sent["buffers"]["messages_received" if dist.get_rank() else "messages_sent"] > 0
    return training.bits(model.parameters())


@pytest.mark.parametrize("name", ["exact", "block_uint8"])
def test_there_is_no_false_alarm(ranks, name):
    every_step = {"BAGUA_CHECK_WEIGHTS_EVERY": "1"}
    results = ranks(3, train_twenty_steps, name, env=every_step)
    assert len(set(results)) == 1


@training.with_group
def change_a_buffer():
    model = nn.Sequential(nn.Linear(training.FEATURES, 3))
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    wrapped(GradientAllReduceAlgorithm(), model)
    if dist.get_rank() == 1:
        next_up(model.frozen, 2)
    data = training.batch(0, dist.get_rank())
    return training.error_of(lambda: training.squared_error(model, data))


def test_frozen_parameters_are_checked_too(ranks):
    for message in ranks(2, change_a_buffer, env={"BAGUA_CHECK_WEIGHTS_EVERY": "1"}):
        assert "First difference: 'frozen' (rank 0 against rank 1)" in message


@training.with_group
def train_apart():
    model, optimizer = wrapped(DecentralizedAlgorithm(hierarchical=False))
    for number in range(4):
        one_step(model, optimizer, number)
    digests = training.gather(training.bits(model.parameters()))
    return len(set(digests)), "check" in model.bagua_stats()["communicators"]


def test_where_ranks_hold_weights_of_their_own_nothing_is_checked(ranks):
    env = {"BAGUA_CHECK_WEIGHTS_EVERY": "1"}
    assert ranks(2, train_apart, env=env) == [(2, False)] * 2


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
    envs = [{"BAGUA_CHECK_WEIGHTS_EVERY": str(every)} for every in (2, 3)]
    for message in ranks(2, wrap, env=envs):
        assert message.startswith("BaguaMismatchError: ")
        assert "[BAGUA_CHECK_WEIGHTS_EVERY=2], rank 1 has [BAGUA_CHECK_WEIGHTS_EVERY=3]" in message
