"""Ranks that die, stop, exit or differ in a sharded training, and how it ends."""

import gc
import math
import os
import signal
import weakref

import pytest
import torch
from support import faults, sharded

SHORT = 4.0  # seconds of timeout where a test waits for it
SECONDS_UNTIL_TOLD = 5.0
DIES = """
import os, signal, sys, time, datetime
import torch, torch.distributed as dist
import bagua.fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={timeout}))
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
mesh = init_device_mesh("cpu", {shape}, mesh_dim_names=("replicate", "shard")[-len({shape}):])
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
bagua.fsdp.compress(model, **{options})
store = dist.distributed_c10d._get_default_store()
store.set(f"pid{{dist.get_rank()}}", str(os.getpid()))

def end():
    {fate}

for step in range(1000):
    start = time.monotonic()
    last = step == 5 and dist.get_rank() == {victim}
    try:
        if last and {where!r} == "forward":
            end()
        loss = model(torch.randn(4, 300)).sum()
        if last and {where!r} == "backward":
            end()
        loss.backward()
    except bagua.BaguaError as error:
        print(round(time.monotonic() - start, 1), type(error).__name__, error)
        sys.stdout.flush()
        if "SIGSTOP" in "{fate}" and dist.get_rank() == 0:
            time.sleep(2.0)  # or the other survivor would take this one for silent
            os.kill(int(store.get("pid{victim}")), signal.SIGCONT)
        os._exit(7)  # torch's group waits for the dead one
"""


def dies(fate, victim, options="{}", where="backward", shape=(3,), timeout=60):
    return DIES.format(
        fate=fate, victim=victim, options=options, where=where, shape=shape, timeout=timeout
    )


@pytest.mark.parametrize(
    ("options", "where", "shape"),
    [
        ("{}", "forward", (3,)),
        ("{}", "backward", (3,)),
        ("{'weights': True}", "forward", (3,)),
        ("{'reduce_scatter': True}", "backward", (2, 2)),
    ],
    ids=["gathering", "reducing", "gathering-in-8-bits", "of-replicas"],
)
def test_the_survivors_of_a_killed_rank_name_it(run_script, options, where, shape):
    n = math.prod(shape)
    ends = run_script(n, dies(faults.KILLED, n - 1, options, where, shape), timeout=60.0)
    assert ends[n - 1].returncode == -signal.SIGKILL
    for rank, text in faults.told(ends, n - 1, SECONDS_UNTIL_TOLD).items():
        assert text.startswith(f"BaguaError rank {n - 1} was killed, stopped or cut off"), text
        assert f"module 'FSDPSequential', rank {rank} of {n}" in text


def test_a_stopped_rank_is_named_at_the_timeout(run_script):
    ends = run_script(3, dies(faults.STOPPED, 2, "{}", "forward", timeout=SHORT), timeout=60.0)
    assert ends[2].returncode == 7, ends[2].stdout + ends[2].stderr
    for text in faults.told(ends, 2, SHORT + SECONDS_UNTIL_TOLD, SHORT - 1).values():
        assert "rank 2 was killed, stopped or cut off: silent for over a second" in text


@sharded.with_torch_group
def other_module():
    """The last rank reduces the gradients of another module."""
    model, handle = sharded.compressed()
    sharded.backward(model, 0)
    module = "0" if faults.is_last() else "2"
    return faults.error_of(
        handle.reduce_scatter, module, torch.ones(4), 1.0, torch.distributed.group.WORLD
    )


def test_ranks_that_reduce_different_modules_are_told_both_sides(ranks):
    for error in ranks(2, other_module):
        assert error.startswith("BaguaMismatchError"), error
        assert "Rank 0: bucket '2.gradients' of round 2: 4 x float32" in error
        assert "rank 1: bucket '0.gradients' of round 2: 4 x float32" in error


@sharded.with_torch_group
def closed():
    model, handle = sharded.compressed()
    sharded.backward(model, 0)
    handle.close()
    handle.close()
    return faults.error_of(sharded.backward, model, 1)


def test_a_backward_after_close_raises(ranks):
    for error in ranks(2, closed):
        assert error.startswith("BaguaError"), error
        assert "was stopped" in error


@sharded.with_torch_group
def freed():
    """A model that goes takes its thread along."""
    model, handle = sharded.compressed()
    sharded.backward(model, 0)
    handle = weakref.ref(handle)
    kept = handle() is not None
    before = len(os.listdir("/proc/self/task"))
    del model
    gc.collect()
    return kept, handle() is None, before - len(os.listdir("/proc/self/task"))


def test_a_model_keeps_its_handle_and_takes_its_threads_along(ranks):
    for kept, gone, threads in ranks(2, freed):
        assert kept
        assert gone
        assert threads >= 2  # the lane and the board


def test_the_interpreter_ends_cleanly(run_script):
    script = """
import torch, torch.distributed as dist, bagua.fsdp
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(5, 3))
bagua.fsdp.compress(model, weights=True)
model(torch.ones(2, 5)).sum().backward()
print("trained", flush=True)
"""
    for ending in ("", "dist.destroy_process_group()", "raise SystemExit(7)"):
        for end in run_script(2, script + ending):
            assert "trained" in end.stdout, end.stderr
            assert end.returncode == (7 if "Exit" in ending else 0), end.stderr
