"""Lanes of ranks that are far apart: chosen by the time of a message, and of no effect on a bit.

A message between ranks of one host takes microseconds, so that these tests call one far.
"""

import os
from unittest import mock

import torch.distributed as dist
from bagua._core.group import connections
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import every_algorithm, training
from torch.nn.parallel import DistributedDataParallel

GLOO = {"BAGUA_COMM": "gloo", **training.SMALL_BUCKETS}
STEPS = 4


def lanes(count):
    return mock.patch.dict(os.environ, {"BAGUA_LANES": str(count)} if count else {})


def called_far(after_us):
    return mock.patch.object(connections, "_FAR_US", after_us)


def trained(name):
    model, optimizer = every_algorithm.wrapped(name, training.network())
    training.train(model, [optimizer], [training.batch(s, dist.get_rank()) for s in range(STEPS)])
    return training.model_bits(model), model.bagua_stats()["network"]


@training.with_group
def train_near_and_far(names):
    """By name: the bits of near ranks, and those of far ones by their lanes."""
    results = {}
    for name in names:
        near, _ = trained(name)
        far = {}
        for count in (1, 4):
            with called_far(1), lanes(count):
                bits, network = trained(name)
            far[network["lanes"]] = bits == near
        results[name] = far
    return results


def test_lanes_of_far_ranks_change_no_bit(ranks):
    for n, names in ((2, every_algorithm.SYNCHRONOUS), (3, ["gradient_allreduce", "power_sgd"])):
        for results in ranks(n, train_near_and_far, names, env=GLOO):
            for name, far in results.items():
                assert all(far.values()), (n, name, far)
            assert {1, 4} <= set(results["gradient_allreduce"]), results


@training.with_group
def train_beside_ddp():
    plain = DistributedDataParallel(training.network())
    training.train_on_ranks(plain, [training.sgd(plain, lr=0.05)], steps=STEPS)
    with called_far(1):
        bits, network = trained("gradient_allreduce")
    return bits == training.model_bits(plain.module), network["lanes"] > 1


def test_exact_gradients_of_far_ranks_have_the_bits_of_ddp(ranks):
    assert ranks(2, train_beside_ddp, env=GLOO) == [(True, True)] * 2


@training.with_group
def wrap_far_and_near():
    def wrap():
        model = training.network()
        model.with_bagua([training.sgd(model)], GradientAllReduceAlgorithm())
        return model.bagua_stats()["network"]

    with called_far(1):
        log = training.log_of(wrap)
        far = wrap()
    with called_far(10_000_000):
        near = wrap()
    return log, far, near


def test_ranks_agree_on_lanes_and_say_why_in_the_log(ranks):
    (log, far, near), (_, others_far, others_near) = ranks(2, wrap_far_and_near, env=GLOO)
    assert far["lanes"] == others_far["lanes"] > 1
    assert 0 < far["round_trip_ms"] == others_far["round_trip_ms"] < 1000
    assert near["lanes"] == others_near["lanes"] == 1
    text = str(log)
    assert f"so {far['lanes']} bucket(s) are under way at a time (BAGUA_LANES)" in text, text


@training.with_group
def wrap_with_other_lanes():
    model = training.network()
    with lanes(1 + dist.get_rank()):
        return training.error_of(
            lambda: model.with_bagua([training.sgd(model)], GradientAllReduceAlgorithm())
        )


def test_ranks_with_other_lanes_are_refused_by_the_variable(ranks):
    for text in ranks(2, wrap_with_other_lanes, env=GLOO):
        assert "BAGUA_LANES=1" in str(text), text
        assert "BAGUA_LANES=2" in str(text), text


@training.with_group
def train_on_one_host():
    with called_far(1):
        return trained("bytegrad")[1]


def test_ranks_that_share_memory_are_near(ranks):
    assert ranks(2, train_on_one_host) == [{"round_trip_ms": 0.0, "lanes": 1}] * 2
