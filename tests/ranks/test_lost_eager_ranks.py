"""Eager collectives that fail: the error says where the other members are, by call."""

import datetime
import functools
import re
import signal
import time
import warnings

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm
from support import faults, hooked, sharded

SHORT = 3.0


@functools.partial(faults.with_bagua_group, timeout=SHORT)
def skip_a_call():
    bagua.allreduce_inplace(torch.ones(4))
    if faults.is_last():
        faults.barrier_of_store("over")
        return None
    start = time.monotonic()
    error = faults.error_of(bagua.broadcast, torch.ones(4), 2)
    faults.barrier_of_store("over")
    return error, time.monotonic() - start


def test_a_member_that_leaves_out_a_call_is_named_with_its_last_one(ranks):
    *others, _ = ranks(3, skip_a_call)
    for rank, (error, seconds) in enumerate(others):
        assert f"broadcast, call 2 on rank {rank} of 3, failed" in error
        assert "rank 2 is 1 call behind, in call 1: after its allreduce_inplace" in error
        assert seconds < SHORT + 4.0


DIES = """
import datetime, os, signal, sys, time, torch
import bagua.torch_api as bagua
bagua.init_process_group(timeout=datetime.timedelta(seconds=30))
for call in range(5):
    bagua.allreduce_inplace(torch.ones(1000))
if bagua.get_rank() == 1:
    time.sleep(0.7)  # for a heartbeat of the last call
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
try:
    bagua.allreduce_inplace(torch.ones(1000))
except bagua.BaguaError as error:
    print(time.monotonic() - start, error)
    sys.exit(7)
"""


def test_a_killed_member_is_silent_and_the_others_end_cleanly(run_script):
    ends = run_script(3, DIES, timeout=40.0)
    assert ends[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ends[rank].returncode == 7, ends[rank].stdout + ends[rank].stderr
        seconds, text = ends[rank].stdout.split(" ", 1)
        assert float(seconds) < 6.0
        assert f"allreduce_inplace, call 6 on rank {rank} of 3" in text
        assert (
            "rank 1 was killed, stopped or cut off, or left by os._exit(): silent for over a "
            "second, last in call 5" in text
        )


@functools.partial(faults.with_bagua_group, timeout=30.0)
def one_is_slow():
    model, optimizer = faults.wrapped()
    faults.step(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if faults.is_last():
            time.sleep(3.0)
        faults.step(model, optimizer)
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


@functools.partial(faults.with_bagua_group, timeout=30.0)
def one_is_slow_by_other_doors():
    """Warnings of each door: a communication hook, a sharded model and an eager call.

    "buckets": torch's wrapper agrees on new ones in its second forward; "gather": of torch's own.
    """
    ddp, handle, _ = hooked.made("small_buckets", ByteGradAlgorithm(hierarchical=False))
    other, handle_of_other, _ = hooked.made("small_buckets", ByteGradAlgorithm(hierarchical=False))
    model, _ = sharded.compressed(weights=True)
    of_torch, _ = sharded.compressed()
    begun, _ = sharded.compressed()

    def gather_begun():
        begun.unshard(async_op=True).wait()
        begun.reshard()

    doors = {
        "hook": lambda: hooked.plain_step(ddp, 0),
        "buckets": lambda: hooked.plain_step(other, 0),
        "fsdp": lambda: sharded.backward(model, 0),
        "gather": lambda: sharded.backward(of_torch, 0),
        "gather that was begun": gather_begun,
        "eager": lambda: bagua.allreduce_inplace(torch.ones(4)),
    }
    told = {door: [] for door in doors}
    store = dist.distributed_c10d._get_default_store()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for door, call in doors.items():
            for _ in range(1 if door == "buckets" else 2):
                call()

            def say(message, *_, door=door, **__):
                if "waited" in str(message):
                    told[door].append(str(message))
                    store.clone().set(f"told by {door}", "1")

            warnings.showwarning = say
            if faults.is_last():
                store.wait([f"told by {door}"], datetime.timedelta(seconds=20))
            call()
    handle.close()
    handle_of_other.close()
    return told


def test_a_slow_rank_is_a_warning_by_every_door(ranks):
    told, slow = ranks(2, one_is_slow_by_other_doors, env={"BAGUA_STRAGGLER_SECONDS": "0.3"})
    assert not any(slow.values())
    for door in told:
        assert told[door], door
        assert told[door][0].startswith("communicator '" if door == "eager" else "module '")
        assert "rank 0 of 2" in told[door][0]
        assert re.search("rank 1 is (1|still in) ", told[door][0]), told[door]
    assert "(DistributedDataParallel's own collectives in its forward)" in told["buckets"][0]
    assert "(gathering the weights of '" in told["gather"][0]
    assert "(gathering the weights of '" in told["gather that was begun"][0]


def test_a_slow_rank_is_a_warning_on_those_that_wait_for_it(ranks):
    told, slow = ranks(2, one_is_slow, env={"BAGUA_STRAGGLER_SECONDS": "0.3"})
    assert slow == []
    assert "has waited" in told[0]
    assert "rank 1 is 1 round behind, in round 1: between two rounds" in told[0]
    assert "came after" in told[-1]
