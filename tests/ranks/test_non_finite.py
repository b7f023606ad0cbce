"""NaN and infinity in one rank's gradient: every rank gets something that is not finite, and counts
it. What all ranks see is what makes a GradScaler, or a user, skip the step on all of them alike."""

import itertools
import math
import time

import pytest
import torch.distributed as dist
from bagua import BaguaError
from support import training
from support.every_algorithm import (
    ALGORITHMS,
    CODECS,
    OWN_WEIGHTS,
    PEERS,
    SYNCHRONOUS,
    WARM_UP,
    wrapped,
)

PLACE = (2, 3)
VALUES = {"nan": math.nan, "plus-inf": math.inf, "minus-inf": -math.inf}
#: Which other elements of the bucket may lose their values with the bad one.
ELEMENT_BY_ELEMENT = ["gradient_allreduce", "bytegrad-fp16", "bytegrad-bf16", "sparse"]
#: After which step, from that of the bad gradient, all ranks have seen what became of it. Weights
#: are sent as they were before a step, by `low_precision_decentralized` as they are after it.
ARRIVES = {
    "decentralized-all": [1],
    "decentralized-shift-one": [1, 2],
    "low_precision_decentralized": [0],
}
#: What raises in the step, before it changes anything: its momentum would stay so for ever.
RAISES = {
    "qadam": [
        "the averaged momentum of '0.weight' and 0 others is not finite, 1 steps after the warm-up",
        "warmup_steps=",
    ]
}
GRADIENTS = [name for name in (*SYNCHRONOUS, *CODECS, "auto") if name not in OWN_WEIGHTS]
WARM = WARM_UP + 1
SMALL = training.SMALL_BUCKETS


def spoil_next_gradient(model, value):
    """On the last rank."""
    weight = model[0].weight

    def spoiled(gradient):
        handle.remove()
        gradient = gradient.clone()
        gradient[PLACE] = value
        return gradient

    if dist.get_rank() == dist.get_world_size() - 1:
        handle = weight.register_hook(spoiled)


def step(model, optimizer, number):
    training.train(model, optimizer, [training.batch(number, dist.get_rank())])


def counts(model):
    stats = model.bagua_stats()
    by_bucket = [bucket["nonfinite_rounds"] for bucket in stats["buckets"]]
    assert stats["total"]["nonfinite_rounds"] == sum(by_bucket)
    return by_bucket


def bad_elements(model):
    return [~parameter.detach().isfinite() for parameter in model.parameters()]


@training.with_group
def one_bad_gradient(name):
    """By value: the counts before and after, what became of the weights, and their bits."""
    seen = {}
    for key, value in VALUES.items():
        model, optimizer = wrapped(name, training.network())
        for number in range(WARM):
            step(model, optimizer, number)
        before = counts(model)
        spoil_next_gradient(model, value)
        if name in RAISES:
            kept = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
            was = training.bits(kept)
            error = training.error_of(lambda: step(model, optimizer, WARM), BaguaError)  # noqa: B023
            assert all(words in error for words in RAISES[name]), error
            assert training.bits(kept) == was
        else:
            step(model, optimizer, WARM)
        seen[key] = (before, counts(model), bad_elements(model), training.model_bits(model))
    return seen


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_bad_gradient_of_one_rank_reaches_all_and_is_counted_once(ranks, name):
    results = ranks(3, one_bad_gradient, name, env=SMALL)
    for key in VALUES:
        for before, after, bad, bits in (seen[key] for seen in results):
            assert sum(before) == 0
            assert sum(after) == 1
            assert bits == results[0][key][3]
            if name in RAISES:
                continue
            assert bad[0].any()
            assert not any(others.any() for others in bad[1:])
            assert bad[0][PLACE]
            if name in ELEMENT_BY_ELEMENT:
                assert bad[0].sum() == 1


@training.with_group
def bad_weights(name):
    """By value: counts and whether the weights are finite, after each of four steps."""
    seen = {}
    for key, value in VALUES.items():
        model, optimizer = wrapped(name, training.network())
        step(model, optimizer, 0)
        assert sum(counts(model)) == 0
        spoil_next_gradient(model, value)
        seen[key] = []
        for number in range(1, 5):
            step(model, optimizer, number)
            seen[key].append((sum(counts(model)), bool(bad_elements(model)[0][PLACE])))
    return seen


@pytest.mark.parametrize("n", [2, 3], ids=lambda n: f"{n}-ranks")
@pytest.mark.parametrize("name", PEERS)
def test_bad_weights_of_one_rank_reach_its_peers_and_are_counted_while_they_last(ranks, name, n):
    for seen in ranks(n, bad_weights, name, env=SMALL):
        for history in seen.values():
            first = next(i for i, (count, _) in enumerate(history) if count)
            assert first in ARRIVES[name]
            # What arrives at second hand has spoilt the other weights there already.
            assert history[first][0] == 1 or name == "decentralized-shift-one"
            assert all(bad for _, bad in history[first:])
            numbers = [count for count, _ in history[first:]]
            assert all(b > a for a, b in itertools.pairwise(numbers))


@training.with_group
def bad_averages():
    model, optimizer = wrapped("async", training.network())
    for number in range(WARM):
        step(model, optimizer, number)
    before = counts(model)
    dist.barrier()  # or a faster rank's NaN is counted before
    spoil_next_gradient(model, math.nan)
    deadline = time.monotonic() + 30
    number = WARM
    while sum(counts(model)) == 0 and time.monotonic() < deadline:
        step(model, optimizer, number)
        number += 1
    model.bagua_algorithm.abort(model)
    rounds = model.bagua_stats()["buckets"][0]["rounds"]
    return before, counts(model)[0], rounds, bool(bad_elements(model)[0][PLACE])


def test_averages_that_are_not_finite_are_counted(ranks):
    for before, after, rounds, bad in ranks(2, bad_averages):
        assert before == [0]
        assert 1 <= after <= rounds
        assert bad


def test_no_algorithm_is_forgotten():
    assert {*GRADIENTS, *OWN_WEIGHTS, "async"} == {*ALGORITHMS, *CODECS}
