"""Sharded trainings whose ranks differ, and how they end. Lost ranks: test_lost_ranks.py."""

import gc
import os
import weakref

import torch
from support import faults, sharded


@sharded.with_torch_group
def other_module():
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
        assert threads >= 1  # the lane's; the board is the group's


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
