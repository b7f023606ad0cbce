"""Ranks that fail or differ under a communication hook. Lost ones: test_lost_ranks.py."""

import functools
import gc
import os
import time
import weakref

from bagua.torch_api.algorithms import ByteGradAlgorithm
from support import faults, hooked, training
from support.cases import over

SECONDS_UNTIL_TOLD = 5.0


def steps(ddp, optimizer, count):
    for step in range(count):
        optimizer.zero_grad()
        hooked.plain_step(ddp, step)
        optimizer.step()


@functools.partial(faults.with_bagua_group, timeout=60.0)
def fail_on_one_rank():
    """The last rank's operation fails; the others wait in gloo, which does not notice."""
    ddp, handle, optimizer = hooked.made("small_buckets", ByteGradAlgorithm(hierarchical=False))
    steps(ddp, optimizer, 3)
    faults.barrier_of_store("ready")
    if faults.is_last():
        time.sleep(1)  # the others are in gloo
        handle._running.abort("out of paper")
    start = time.monotonic()
    error = faults.error_of(steps, ddp, optimizer, 100)
    seconds = time.monotonic() - start
    faults.barrier_of_store("over")
    return error, seconds


def test_a_failure_of_one_rank_ends_the_wait_of_the_others_soon(ranks):
    results = ranks(3, fail_on_one_rank)
    for error, seconds in results:
        assert error.startswith("BaguaError"), error
        assert "out of paper" in error
        assert seconds < 1 + SECONDS_UNTIL_TOLD
    for error, _ in results[:2]:
        assert "rank 2: out of paper" in error.splitlines()[0]


@training.with_group
def freed():
    """A model that goes takes its thread along, and the hook does not keep it."""
    ddp, handle, optimizer = hooked.made("small_buckets", ByteGradAlgorithm(hierarchical=False))
    steps(ddp, optimizer, 2)
    handle = weakref.ref(handle)
    before = len(os.listdir("/proc/self/task"))
    gone = weakref.ref(ddp.module[0].weight)
    del ddp, optimizer
    gc.collect()
    after = len(os.listdir("/proc/self/task"))
    return handle() is None, gone() is None, before - after


def test_a_model_that_goes_takes_its_threads_along(ranks):
    for handle_gone, parameters_gone, threads in ranks(2, freed):
        assert handle_gone
        assert parameters_gone
        assert threads >= 1  # the lane's; the board is the group's


ENDINGS = {
    "destroyed": "bagua.destroy_process_group()",
    "torch_destroyed": "dist.destroy_process_group()",
    "nothing": "",
    "exception": "raise SystemExit(7)",
    "in_backward": "ddp(torch.randn(4, 5)).sum().backward() if dist.get_rank() == 0 else None",
}
SCRIPT = """
import torch, torch.distributed as dist
import bagua.torch_api as bagua
from bagua import comm_hooks
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
keep = comm_hooks.register(ddp, "gradient_allreduce")
for _ in range(3):
    ddp(torch.randn(4, 5)).sum().backward()
print("trained", flush=True)
{ending}
"""


@over(ending=ENDINGS)
def test_the_interpreter_ends_cleanly(run_script, ending):
    for rank, end in enumerate(run_script(2, SCRIPT.format(ending=ENDINGS[ending]))):
        failed = ending == "in_backward" and rank == 0
        expected = 7 if ending == "exception" else int(failed)
        assert "trained" in end.stdout, end.stderr
        assert end.returncode == expected, end.stderr
        if failed:
            assert "BaguaError: rank 1 exited after 3 rounds" in end.stderr
