"""Ctrl-C: the rank that waits ends at once, and the others are told by whom they were left."""

import contextlib
import datetime
import itertools
import os
import signal
import tempfile
import threading
import time
from unittest import mock

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua._core.group.membership import Membership
from bagua.torch_api.algorithms import (
    AsyncModelAverageAlgorithm,
    GradientAllReduceAlgorithm,
)
from bagua.torch_api.checkpoint import save_checkpoint
from support import faults

TIMEOUT = 12.0  # of the group: the interrupted waits do not end by it
SECONDS_UNTIL_WAITING = 0.3
AT_ONCE = 3.0  # seconds; a tenth, and what a busy machine adds


def interrupted(wait):
    """Seconds that `wait()` went on after Ctrl-C."""
    sent = []

    def send():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(SECONDS_UNTIL_WAITING, send)
    timer.start()
    try:
        wait()
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    finally:
        timer.cancel()
    raise AssertionError("the wait ended without KeyboardInterrupt")


def steps_of(algorithm):
    model, optimizer = faults.wrapped(algorithm=algorithm)
    faults.step(model, optimizer)
    return lambda: faults.step(model, optimizer)


def end_of_averages():
    model, optimizer = faults.wrapped(algorithm=AsyncModelAverageAlgorithm(sync_interval_ms=20))
    faults.step(model, optimizer)
    return lambda: model.bagua_algorithm.abort(model)


def first_wrap():
    return faults.wrapped


def second_wrap():
    faults.wrapped()
    return faults.wrapped


def collective():
    bagua.allreduce_inplace(torch.ones(4))
    return lambda: bagua.allreduce_inplace(torch.ones(4))


def checkpoint():
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    model, optimizer = faults.wrapped()
    state = {"model": model, "optimizer": optimizer}
    save_checkpoint(folders[0], state, 0)
    steps = itertools.count(1)
    return lambda: save_checkpoint(folders[0], state, next(steps))


#: Each makes what the ranks have done together, and returns a call that waits for the others.
SITUATIONS = {
    "round": lambda: steps_of(GradientAllReduceAlgorithm()),
    "end of averages": end_of_averages,
    "wrap": first_wrap,
    "second wrap": second_wrap,
    "collective": collective,
    "checkpoint": checkpoint,
}


def leave_one_waiting(situation, transport):
    """On the last rank the seconds until it has ended; on the other one what that is told."""
    limit = datetime.timedelta(seconds=TIMEOUT)
    with mock.patch.dict(os.environ, BAGUA_COMM=transport):
        bagua.init_process_group(timeout=limit)
        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        wait = SITUATIONS[situation]()
        if faults.is_last():
            seconds = interrupted(wait)
            bagua.destroy_process_group()
            store.set("interrupted", "")
            return seconds
        store.wait(["interrupted"], limit)
        start = time.monotonic()
        text = faults.error_of(lambda: [wait() for _ in range(100)])
        seconds = time.monotonic() - start
        with contextlib.suppress(bagua.BaguaError):
            bagua.destroy_process_group()
        return text, seconds


#: A wait of each kind is over gloo as well: of a lane, of its end, of a call, of an address.
OVER_GLOO = ("round", "end of averages", "collective", "second wrap")
CASES = [
    *((situation, "shm") for situation in SITUATIONS),
    *((situation, "gloo") for situation in OVER_GLOO),
]


@pytest.mark.parametrize(("situation", "transport"), CASES)
def test_ctrl_c_ends_a_wait_at_once_and_the_other_rank_is_told(ranks, situation, transport):
    (text, told_after), seconds = ranks(2, leave_one_waiting, situation, transport, init=False)
    assert seconds < AT_ONCE
    assert "rank 1 was interrupted" in text
    assert told_after < TIMEOUT + 4.0  # it may have waited for an address that does not come


def wait_for_the_job(how):
    if how == "store":
        nothing_listens = "1"
        os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_PORT=nothing_listens)
        return interrupted(bagua.init_process_group)
    store = dist.HashStore()
    return interrupted(lambda: bagua.init_process_group(store, 1, 2, 2))


@pytest.mark.parametrize("how", ["store", "rank 0"])
def test_ctrl_c_ends_the_wait_for_the_job_at_once(ranks, how):
    assert ranks(1, wait_for_the_job, how, fresh=True, init=False)[0] < AT_ONCE


def leave_while_joining():
    """On the rank that joins the seconds until it has ended; on the member the next generation."""
    store = dist.distributed_c10d._get_default_store()
    elastic = dist.PrefixStore("elastic", store)
    member = Membership(elastic, dist.get_rank(), datetime.timedelta(seconds=TIMEOUT))
    if faults.is_last():
        store.wait(["founded"])
        seconds = interrupted(lambda: member.join(member.ask()))
        del member
        store.set("interrupted", "")
        return seconds
    member.found([0])
    store.set("founded", "")
    store.wait(["interrupted"])
    assert member.requests()
    return member.change({}, 1)


def test_ctrl_c_ends_a_rank_that_waits_to_join_and_the_members_go_on(ranks):
    change, seconds = ranks(2, leave_while_joining)
    assert seconds < AT_ONCE
    assert (change.members, change.joined, change.lost) == ([0], [], [])
