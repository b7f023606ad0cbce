"""Outer rounds that wait for nobody: ranks at their own speed, weights by steps, sync, failures."""

import random

import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import DiLoCoAlgorithm, OuterSGD
from ranks.test_diloco import (
    assert_outer_state_agrees,
    assert_weights_are_the_anchor,
    own_step,
)
from ranks.test_elastic_rounds import fail_round
from support import training

PLAIN = OuterSGD(1.0, 0.0)
INTERVAL = 3


def wrapped(dtype=torch.float64, **arguments):
    """A network, its optimizer, and its weights after each step, before a round."""
    model = training.network().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = []
    optimizer.register_step_post_hook(lambda *_: trained.append(flat_of(model)))
    arguments = {"max_interval": 1000} | arguments
    model.with_bagua([optimizer], DiLoCoAlgorithm(PLAIN, INTERVAL, **arguments))
    return model, optimizer, trained


def flat_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def steps(model, optimizer, count, first=0):
    for step in range(first, first + count):
        own_step(model, optimizer, step, torch.float64)


def until_a_round(model, optimizer, first):
    """Steps until one more round is made; their number."""
    before, made = model.bagua_algorithm.outer_rounds, 0
    while model.bagua_algorithm.outer_rounds == before:
        steps(model, optimizer, 1, first + made)
        made += 1
    return made


@training.with_group
def one_is_slow(weight):
    """Ranks 0 and 1 make 8 steps while rank 2 makes one; then all train on until a round is made.

    The anchor, and the mean of all ranks' weights at the launch, by the steps that they have made.
    """
    model, optimizer, trained = wrapped(weight=weight)
    slow = dist.get_rank() == 2
    steps(model, optimizer, 1 if slow else 8)
    assert model.bagua_algorithm.outer_rounds == 0
    dist.barrier()  # nobody has waited for rank 2
    made = len(trained)
    made += until_a_round(model, optimizer, made)
    assert_outer_state_agrees(model)
    assert_weights_are_the_anchor(model)
    shares = torch.ones(3) if weight == "ranks" else torch.tensor(training.gather(made))
    everyone = torch.stack(training.gather(trained[-1]))
    expected = (shares.double()[:, None] * everyone).sum(0) / shares.sum()
    anchor = flat_of(model)
    assert until_a_round(model, optimizer, made) >= INTERVAL
    model.bagua_algorithm.sync()
    return made, anchor, expected


@pytest.mark.parametrize("weight", ["ranks", "steps"])
def test_fast_ranks_train_on_until_the_slowest_has_asked(ranks, weight):
    results = ranks(3, one_is_slow, weight)
    for _, anchor, expected in results:
        torch.testing.assert_close(anchor, expected, rtol=1e-12, atol=1e-12)
    made = [number for number, _, _ in results]
    assert min(made[:2]) > 8
    assert made[2] >= INTERVAL


@training.with_group
def one_waits_at_last():
    """Rank 0 makes three steps of at most four before rank 1 begins; the steps until a round."""
    model, optimizer, _ = wrapped(max_interval=4)
    if dist.get_rank() == 0:
        steps(model, optimizer, 3)
    dist.barrier()
    made = until_a_round(model, optimizer, 3)
    assert_outer_state_agrees(model)
    return made


def test_after_max_interval_a_rank_waits(ranks):
    first, second = ranks(2, one_waits_at_last)
    assert first == 1
    assert INTERVAL <= second <= 4


@training.with_group
def synced_at_any_step(arguments):
    """Anchors after syncs between which ranks make numbers of steps of their own."""
    chance = random.Random(dist.get_rank())
    model, optimizer, _ = wrapped(**arguments)
    first, digests = 0, []
    for _ in range(6):
        count = chance.randrange(12)
        for step in range(first, first + count):
            model.bagua_algorithm.count_samples(1)
            own_step(model, optimizer, step, torch.float64)
        first += count
        model.bagua_algorithm.sync()
        assert_outer_state_agrees(model)
        assert_weights_are_the_anchor(model)
        rounds = model.bagua_algorithm.outer_rounds
        before = training.bits(model.parameters())
        model.bagua_algorithm.sync()  # nobody has trained since
        assert training.bits(model.parameters()) == before
        assert model.bagua_algorithm.outer_rounds == rounds
        digests.append(before)
    assert len(set(digests)) == len(digests)
    return digests, rounds


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"weight": "samples", "codec": "int4_block", "guard": True},
        {"overlap_steps": 2, "weight": "steps"},
    ],
    ids=["plain", "samples-int4", "overlapped-steps"],
)
def test_sync_joins_ranks_that_are_at_different_steps(ranks, arguments):
    results = ranks(3, synced_at_any_step, arguments)
    assert results == [results[0]] * 3


@training.with_group
def a_round_fails(victim, method, overlap):
    model, optimizer, _ = wrapped(elastic=True, overlap_steps=overlap)
    restore = fail_round(2, victim, method)
    made = 0
    try:
        while model.bagua_algorithm.outer_rounds < 4:
            made += until_a_round(model, optimizer, made)
    finally:
        restore()
    model.bagua_algorithm.sync()
    assert_outer_state_agrees(model)
    assert_weights_are_the_anchor(model)
    return model.process_group.ranks


@pytest.mark.parametrize(
    ("victim", "method", "overlap"), [(1, "meet", 0), (0, "met", 0), (2, "met", 1)], ids=str
)
def test_a_failed_round_is_survived(ranks, victim, method, overlap):
    assert ranks(3, a_round_fails, victim, method, overlap) == [[0, 1, 2]] * 3


@training.with_group
def saved_while_asking():
    """A checkpoint of a rank that has asked for a round and trains on."""
    model, optimizer, _ = wrapped(weight="steps")
    steps(model, optimizer, 5 if dist.get_rank() == 0 else 1)
    state, weights = model.bagua_algorithm.state_dict(), model.state_dict()
    other, of_other, _ = wrapped(weight="steps")
    other.load_state_dict(weights)
    other.bagua_algorithm.load_state_dict(state)
    digests = []
    for trained, its in ((model, optimizer), (other, of_other)):
        trained.bagua_algorithm.sync()
        assert_outer_state_agrees(trained)
        digests.append(training.bits(trained.parameters()))
        until_a_round(trained, its, 10)
        trained.bagua_algorithm.sync()
    return digests


def test_a_rank_that_has_asked_can_be_saved(ranks):
    for went_on, loaded in ranks(2, saved_while_asking):
        assert went_on == loaded


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"interval": 5, "max_interval": 4}, "max_interval=4 must be at least interval=5"),
        ({"fragments": 2, "max_interval": 200}, "takes fragments=1, not 2"),
        ({"inner": "node", "max_interval": 200}, 'inner="node" takes no max_interval'),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        DiLoCoAlgorithm(**arguments)
