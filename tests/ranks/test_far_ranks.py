"""Lanes of ranks that are far apart: chosen by the time of a message, and of no effect on a bit.

A message between ranks of one host takes microseconds, so that these tests call one far.
"""

import os
from unittest import mock

import pytest
import torch.distributed as dist
from bagua._core.group import connections, environment
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import every_algorithm, training
from support.processes import sockets
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
        with mock.patch.object(environment, "congestion_controls", return_value=["cubic"]):
            log_without_bbr = training.log_of(wrap)
    with called_far(10_000_000):
        near = wrap()
    return (log, log_without_bbr), far, near


def test_ranks_agree_on_lanes_and_say_why_in_the_log(ranks):
    (logs, far, near), (_, others_far, others_near) = ranks(2, wrap_far_and_near, env=GLOO)
    assert far["lanes"] == others_far["lanes"] > 1
    assert 0 < far["round_trip_ms"] == others_far["round_trip_ms"] < 1000
    assert near["lanes"] == others_near["lanes"] == 1
    with_bbr, without = map(str, logs)
    assert f"so {far['lanes']} bucket(s) are under way at a time (BAGUA_LANES)" in with_bbr
    assert ["modprobe tcp_bbr" in text for text in (with_bbr, without)] == [
        "bbr" not in environment.congestion_controls(),
        True,
    ]


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
    near = {"round_trip_ms": 0.0, "lanes": 1, "congestion_control": ""}
    assert ranks(2, train_on_one_host) == [near] * 2


@training.with_group
def connect_far_ranks():
    """Whether torch's connections kept their congestion control; that of bagua's, and as told."""
    before = sockets.congestion_controls()
    with called_far(1):
        _, network = trained("gradient_allreduce")
    after = sockets.congestion_controls()
    kept = all(after.get(inode, control) == control for inode, control in before.items())
    ports, (_, store) = sockets.connected(), environment.store_address()
    between = {inode for inode in ports if store not in ports[inode]} - before.keys()
    ours = {after[inode] for inode in between if inode in after}
    return kept, ours, network["congestion_control"]


@pytest.mark.parametrize("named", ["reno", ""])
def test_far_ranks_control_congestion_as_asked_or_by_bbr(ranks, named):
    known = environment.congestion_controls()
    expected = named or ("bbr" if "bbr" in known else known[0])
    env = GLOO | {"BAGUA_CONGESTION_CONTROL": named}
    for kept, ours, told in ranks(2, connect_far_ranks, env=env):
        assert kept
        assert ours == {expected}
        assert told == expected


@training.with_group
def connect_by_an_unknown_control():
    with called_far(1):
        return training.error_of(lambda: trained("gradient_allreduce"))


def test_a_congestion_control_that_the_kernel_has_not_is_refused(ranks):
    env = GLOO | {"BAGUA_CONGESTION_CONTROL": "carrier_pigeon"}
    for text in ranks(2, connect_by_an_unknown_control, env=env):
        assert "BAGUA_CONGESTION_CONTROL=carrier_pigeon: the kernel does not let" in str(text)
