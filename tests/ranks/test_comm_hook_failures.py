"""Ranks that fail or differ under a communication hook. Lost ones: test_lost_ranks.py."""

import functools
import gc
import os
import threading
import time
import weakref

import pytest
import torch
from bagua import _C, comm_hooks
from bagua.torch_api.algorithms import ByteGradAlgorithm
from support import faults, hooked, training
from torch.nn.parallel import DistributedDataParallel

SHORT = 4.0  # seconds of timeout where a test waits for it
SECONDS_UNTIL_TOLD = 5.0


def registered(model=None, algorithm=None):
    torch.manual_seed(0)
    model = hooked.network() if model is None else model
    ddp = DistributedDataParallel(model, **hooked.SMALL)
    algorithm = algorithm or ByteGradAlgorithm(hierarchical=False)
    return ddp, comm_hooks.register(ddp, algorithm), training.sgd(ddp)


def steps(ddp, optimizer, count, first=0):
    for step in range(first, first + count):
        optimizer.zero_grad()
        hooked.plain_step(ddp, step)
        optimizer.step()


def until_error(ddp, optimizer):
    start = time.monotonic()
    error = faults.error_of(steps, ddp, optimizer, 100)
    return error, time.monotonic() - start


@functools.partial(faults.with_bagua_group, timeout=60.0)
def fail_on_one_rank():
    """The last rank's operation fails; the others wait in gloo, which does not notice."""
    ddp, handle, optimizer = registered()
    steps(ddp, optimizer, 3)
    if faults.is_last():
        faults.barrier_of_store("ready")
        time.sleep(1)  # the others are in gloo
        handle._running.abort("out of paper")
        error = faults.error_of(hooked.plain_step, ddp, 3), 0.0
    else:
        faults.barrier_of_store("ready")
        error = until_error(ddp, optimizer)
    faults.barrier_of_store("over")
    return error


def test_a_failure_of_one_rank_ends_the_wait_of_the_others_soon(ranks):
    results = ranks(3, fail_on_one_rank)
    for error, seconds in results:
        assert error.startswith("BaguaError"), error
        assert "out of paper" in error
        assert seconds < 1 + SECONDS_UNTIL_TOLD
    for error, _ in results[:2]:
        assert "rank 2: out of paper" in error.splitlines()[0]


@functools.partial(faults.with_bagua_group, timeout=SHORT)
def skip_a_step():
    ddp, _, optimizer = registered()
    steps(ddp, optimizer, 3)
    result = None if faults.is_last() else until_error(ddp, optimizer)
    faults.barrier_of_store("over")
    return result


def test_a_rank_that_makes_fewer_steps_is_named_at_the_timeout(ranks):
    for error, seconds in ranks(2, skip_a_step)[:1]:
        assert error.startswith("BaguaTimeoutError: rank 1 is 1 round behind, in round 3"), error
        assert seconds < SHORT + SECONDS_UNTIL_TOLD


@functools.partial(faults.with_bagua_group, timeout=30.0)
def one_parameter_more():
    """In the second step the last rank posts a bucket that the others do not have."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        hooked.Branches(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=False,
        **hooked.SMALL,
    )
    handle = comm_hooks.register(ddp, ByteGradAlgorithm(hierarchical=False))
    hooked.plain_step(ddp, 0)
    # Stands for a rank with another number of buckets.
    if faults.is_last():
        other = _C.BucketOperations("17", "something else", [])
        try:
            handle._running.post(other, torch.zeros(3), round=2).wait()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            result = f"{type(error).__name__}: {error}"
    else:
        result = faults.error_of(hooked.plain_step, ddp, 1)
    faults.barrier_of_store("over")
    return result


def test_ranks_with_different_buckets_are_told_both_sides(ranks):
    for error in ranks(2, one_parameter_more):
        assert error.startswith("BaguaMismatchError"), error
        assert "Rank 0: bucket '0' of round 2" in error
        assert "rank 1: bucket '17' of round 2: 3 x float32, something else" in error


@training.with_group
def freed():
    """A model that goes takes its thread along, and the hook does not keep it."""
    ddp, handle, optimizer = registered()
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
        assert threads >= 2  # the lane and the board


@training.with_group
def without_gil():
    """Backward goes on while another thread holds the GIL most of the time."""
    ddp, handle, optimizer = registered()
    steps(ddp, optimizer, 2)
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            sum(range(1000))

    spinner = threading.Thread(target=spin)
    spinner.start()
    steps(ddp, optimizer, 5, first=2)
    stop.set()
    spinner.join()
    return training.model_bits(ddp), handle.stats()["rounds"]


def test_a_busy_python_thread_does_no_harm(ranks):
    first, second = ranks(2, without_gil)
    assert first == second
    assert first[1] == 7


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


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_cleanly(run_script, ending):
    for rank, end in enumerate(run_script(2, SCRIPT.format(ending=ENDINGS[ending]))):
        failed = ending == "in_backward" and rank == 0
        expected = 7 if ending == "exception" else int(failed)
        assert "trained" in end.stdout, end.stderr
        assert end.returncode == expected, end.stderr
        if failed:
            assert "BaguaError: rank 1 exited after 3 rounds" in end.stderr
