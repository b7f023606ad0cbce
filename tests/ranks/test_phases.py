"""Calls that every rank must make, and that one does not make."""

import functools
import warnings

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua import _C
from bagua._core.group.process_group import get_default_group
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from support import faults, training
from support.processes.thread_names import thread_names


def wrap_on_rank_0_only(waits):
    """`with_bagua` under `if rank == 0`, while rank 1 ends: perhaps after rank 0 has said so."""
    bagua.init_process_group()
    store = dist.distributed_c10d._get_default_store()
    said = []

    def say(message, *_, **__):
        said.append(str(message))
        store.set("said", "1")

    try:
        if dist.get_rank() == 1:
            if waits:
                store.wait(["said"])
            return "", []
        warnings.showwarning = say
        warnings.simplefilter("always")
        model = training.network()
        algorithm = GradientAllReduceAlgorithm()
        return training.error_of(lambda: model.with_bagua([], algorithm)), said
    finally:
        bagua.destroy_process_group()


@pytest.mark.parametrize("waits", [False, True], ids=["exits_at_once", "exits_late"])
def test_a_wrap_on_one_rank_names_the_rank_it_waits_for_and_the_one_that_exited(ranks, waits):
    env = {"BAGUA_STRAGGLER_SECONDS": "0.5" if waits else "0"}
    (error, said), _ = ranks(2, wrap_on_rank_0_only, waits, env=env, fresh=True)
    assert error.startswith("BaguaError: bagua.wrap, rank 0 of 2: rank 1 has exited")
    assert "if rank == 0" in error
    assert bool(said) == waits
    for line in said:
        assert "bagua.wrap, rank 0 of 2: waiting for other ranks" in line
        assert "rank 1 has not come to this call: its last call was init_process_group" in line


@functools.partial(faults.with_bagua_group, timeout=40.0)
def act_on_rank_0_alone(act, folder):
    """Errors of an act of all ranks that rank 0 alone begins, while rank 1 goes on training."""
    model, optimizer = faults.wrapped()
    faults.step(model, optimizer)
    acts = {
        "save_checkpoint": lambda: save_checkpoint(folder, {"model": model}, 1),
        "load_latest": lambda: load_latest(folder, {"model": model}),
        "average_weights": lambda: bagua.average_weights(model),
        "allreduce_inplace": lambda: bagua.allreduce_inplace(torch.ones(2)),
    }
    if dist.get_rank() == 0:
        return faults.error_of(acts[act])
    return faults.error_of(faults.step, model, optimizer)


@pytest.mark.parametrize(
    "act", ["save_checkpoint", "load_latest", "average_weights", "allreduce_inplace"]
)
def test_an_act_of_all_ranks_on_rank_0_alone_is_an_error_that_says_so(ranks, act, tmp_path):
    env = {"BAGUA_STRAGGLER_SECONDS": "0.3"}
    first, second = ranks(2, act_on_rank_0_alone, act, str(tmp_path), env=env)
    assert "rank 1 does not make this call: it waits in round 2 of module 'Sequential'" in first
    assert f"Every rank of the group must call {act}" in first
    assert "if rank == 0" in first
    assert "rank 0 exited after 1 rounds" in second


@functools.partial(faults.with_bagua_group, timeout=40.0)
def make_phases():
    """Keys in the store, and threads of boards, after 3 and after 30 phases."""
    connections = get_default_group().connections
    counts = []
    for times in (3, 27):
        for _ in range(times):
            connections.reduce_numbers("counting", _C.ReduceOp.SUM, 1)
        faults.barrier_of_store(f"counted {times}")
        keys = dist.distributed_c10d._get_default_store().num_keys()
        boards = sum(name in ("bagua-beats", "bagua-asks") for name in thread_names())
        counts.append((keys, boards))
    faults.barrier_of_store("over")
    return counts


def test_phases_leave_neither_keys_nor_threads(ranks):
    for (keys, threads), (keys_later, threads_later) in ranks(2, make_phases):
        assert keys_later - keys <= 4  # of the barrier
        assert threads == threads_later
