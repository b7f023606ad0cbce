"""Time-outs of torch's transports: they have no type of their own, their texts tell them."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from bagua._core.group.connections import Connections
from ranks.test_shared_memory import LATE_SECONDS, script
from support import training

LATE = timedelta(seconds=LATE_SECONDS)


def own_store(name):
    store = dist.distributed_c10d._get_default_store().clone()
    store.set_timeout(LATE)
    return dist.PrefixStore(name, store)


def backend_that_is_late():
    return dist.ProcessGroupGloo(own_store("connected"), dist.get_rank(), 2, LATE)


def all_reduce():
    return backend_that_is_late().allreduce([torch.zeros(4)]).wait()


def receive():
    return backend_that_is_late().recv([torch.zeros(4)], 1, 0).wait()


def connect():
    return dist.ProcessGroupGloo(own_store("alone"), 0, 2, LATE)


def wait_for_key():
    return own_store("keys").get("nobody sets this")


def error_without_rank_one(call, connects):
    """The error of torch's own call on rank 0; rank 1 connects if `connects`, and no more."""
    if dist.get_rank() == 1:
        backend = backend_that_is_late() if connects else None
        dist.barrier()  # on the default group: rank 1 is late, not gone
        del backend
        return None
    error = training.error_of(call)
    dist.barrier()
    return error


@pytest.mark.parametrize(
    ("call", "connects"),
    [(all_reduce, True), (receive, True), (connect, False), (wait_for_key, False)],
    ids=["all_reduce", "receive", "connect", "wait_for_key"],
)
def test_the_text_of_a_time_out_of_torch_is_recognised(ranks, call, connects):
    error = ranks(2, error_without_rank_one, call, connects)[0]
    assert _C.is_timeout_of_transport(error), f"torch {torch.__version__}: {error}"


def connect_and_die():
    backend = dist.ProcessGroupGloo(own_store("dying"), dist.get_rank(), 2, timedelta(seconds=60))
    if dist.get_rank() == 1:
        print("connected", flush=True)
        os._exit(0)
    print(training.error_of(lambda: backend.allreduce([torch.zeros(4)]).wait()), flush=True)
    os._exit(0)


def test_the_text_of_a_lost_connection_is_no_time_out(run_script):
    error = run_script(2, script("connect_and_die()", "test_transport_timeouts"))[0].stdout
    assert "Error: " in error
    assert not _C.is_timeout_of_transport(error), f"torch {torch.__version__}: {error}"


def late_connection():
    if dist.get_rank() == 1:
        dist.barrier()
        return None
    store = dist.distributed_c10d._get_default_store()
    connections = Connections(store, 0, [0, 1], LATE)
    error = training.error_of(lambda: connections.connect("late", "cpu"))
    dist.barrier()
    return error


def test_a_rank_that_does_not_connect_is_a_timeout(ranks):
    error = ranks(2, late_connection)[0]
    assert error.startswith("BaguaTimeoutError: rank 0 of 2 could not connect to the others")
