"""Statistics by purpose, profiles, logging."""

import functools
import itertools
import json
import logging

import bagua.torch_api as bagua
import pytest
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from torch import nn
from torch.profiler import ProfilerActivity, profile

SCRIPT = """
import logging
{configure}
import bagua.torch_api as bagua, torch
bagua.init_process_group()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], bagua.algorithms.GradientAllReduceAlgorithm())
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
model.with_bagua([optimizer], bagua.algorithms.ByteGradAlgorithm(hierarchical=False))
"""
LANES = pytest.mark.parametrize("lanes", [1, 2], ids=lambda lanes: f"{lanes}-lanes")


def trained(algorithm, model=None, steps=3):
    model = training.network() if model is None else model
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], algorithm)
    training.train_on_ranks(model, optimizer, steps)
    return model


@training.with_group
def stats_of_buffers():
    model = nn.Sequential(nn.Linear(training.FEATURES, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    return trained(GradientAllReduceAlgorithm(), model, steps=4).bagua_stats()


def test_buffers_are_counted_apart(ranks):
    results = ranks(2, stats_of_buffers)
    for rank, stats in enumerate(results):
        buffers = stats["communicators"]["buffers"]
        whole = 4 * (2 * 7 * 4 + 8)  # two of floats, one integer, in each of four forwards
        assert buffers["bytes_sent" if rank == 0 else "bytes_received"] == whole
        assert stats["total"]["bytes_sent"] == stats["communicators"]["all"]["bytes_sent"]


@training.with_group
def stats_without_buckets():
    model = nn.Linear(2, 2).requires_grad_(False)
    model.with_bagua([], GradientAllReduceAlgorithm())
    empty = model.bagua_stats()
    full = trained(GradientAllReduceAlgorithm()).bagua_stats()
    return empty, full


def test_statistics_have_the_same_fields_whatever_was_sent(ranks):
    empty, full = ranks(1, stats_without_buckets)[0]
    assert empty.keys() == full.keys()
    assert empty["total"].keys() == full["total"].keys()
    assert empty["control"].keys() == full["control"].keys()
    assert set(empty["total"].values()) == {0}
    assert full["total"].keys() | {"name", "ops", "rounds"} == full["buckets"][0].keys()
    documented = bagua.BaguaModule.bagua_stats.__doc__
    for key in [*full, *full["buckets"][0]]:
        assert f"``{key}``" in documented, key


@training.with_group
def profile_a_step(folder):
    sizes = [training.FEATURES, 61, 40, 40, training.OUTPUTS]
    layers = itertools.starmap(functools.partial(nn.Linear, bias=False), itertools.pairwise(sizes))
    model = nn.Sequential(*layers)
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], ByteGradAlgorithm(hierarchical=False))
    data = training.batch(0, dist.get_rank())
    training.train(model, optimizer, [data])  # threads exist
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        training.train(model, optimizer, [data])
    path = f"{folder}/{dist.get_rank()}.json"
    profiler.export_chrome_trace(path)
    names = [bucket.name for bucket in model.bagua_buckets]
    events = [(e.name, e.thread) for e in profiler.events() if e.name.startswith("bagua::")]
    return names, events


@LANES
def test_every_op_and_lane_has_a_name_in_profiles(ranks, lanes, tmp_path):
    env = {**training.SMALL_BUCKETS, "BAGUA_LANES": str(lanes)}
    # In fresh processes: the profiler gives a thread the name of an ended one with its address.
    found = ranks(2, profile_a_step, str(tmp_path), env=env, fresh=True)
    for rank, (buckets, events) in enumerate(found):
        names = [name for name, _ in events]
        assert len(buckets) == 4
        op = "CompressedAllReduce(block_uint8, mean, ranks 2)"
        for bucket in buckets:
            assert names.count(f"bagua::{bucket}::{op}") == 1
        for part in ("encode", "reduce", "decode"):
            assert names.count(f"bagua::{part}") == 4
        assert names.count("bagua::exchange") == 8
        assert names.count("bagua::agreement") == names.count("bagua::wait") == 1
        lanes_of_ops = {thread for name, thread in events if name.endswith(op)}
        waiting = {thread for name, thread in events if name == "bagua::wait"}
        assert len(lanes_of_ops) == lanes
        assert not lanes_of_ops & waiting
        trace = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        threads = {
            event["args"]["name"]
            for event in trace
            if event.get("ph") == "M" and event["name"] == "thread_name"
        }
        for lane in range(lanes):
            assert any(f"bagua-lane{lane}" in name for name in threads), threads


@training.with_group
def messages_of_training():
    def wrap_twice():
        model = trained(GradientAllReduceAlgorithm(hierarchical=True), steps=1)
        model.with_bagua([], ByteGradAlgorithm(hierarchical=False))

    return training.log_of(wrap_twice, logging.DEBUG)


def test_the_log_tells_of_wraps_and_connections(ranks):
    nodes = environment_of_nodes((2, 1))
    for rank, messages in enumerate(ranks(3, messages_of_training, env=nodes)):
        told = [text for level, text in messages if level == "INFO"]
        assert told == [
            f"module 'Sequential': {name}, rank {rank} of 3, 2 node(s): "
            f"4 tensors of {4 * (5 * 7 + 7 + 7 * 3 + 3)} bytes in 1 bucket(s)"
            for name in ("GradientAllReduceAlgorithmImpl", "ByteGradAlgorithmImpl")
        ]
        details = [text for level, text in messages if level == "DEBUG"]
        assert any("connected 'wrap1/lane0/node" in text for text in details) == (rank < 2)
        assert any("connected 'wrap1/lane0/leaders'" in text for text in details) == (rank != 1)
        assert any("connected 'wrap2/lane0/all' (cpu) to ranks [0, 1, 2]" in t for t in details)


def test_an_application_sees_the_log_if_it_has_configured_logging(run_script):
    for configure in ("", "logging.lastResort.setLevel(0)"):
        for ended in run_script(2, SCRIPT.format(configure=configure)):
            assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    configure = "logging.basicConfig(level='INFO')"
    for rank, ended in enumerate(run_script(2, SCRIPT.format(configure=configure))):
        assert ended.returncode == 0
        assert (
            f"INFO:bagua:module 'Linear': ByteGradAlgorithmImpl, rank {rank} of 2" in ended.stderr
        )
