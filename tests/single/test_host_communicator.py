"""HostCommunicator on thread ranks: memory that is used again, refusals, abort."""

import pytest
import torch
from bagua import _C
from support.threads import communicator_conformance as conformance
from support.threads.thread_ranks import run_thread_ranks


def through_host(n, function, timeout=20.0):
    """`function(communicator)` on n thread ranks whose tensors go through host memory."""
    return run_thread_ranks(n, lambda comm: function(_C.HostCommunicator(comm)), timeout=timeout)


def test_calls_of_all_sizes_and_dtypes_take_turns_with_the_same_memory():
    """What a larger call left in host memory is nothing that a smaller one would see."""

    def run(comm):
        for numel, dtype in [(5000, torch.float64), (3, torch.float16), (700, torch.uint8)] * 2:
            for check in conformance.CHECKS:
                check(comm, dtype, numel)

    through_host(3, run)


def test_the_callers_tensors_are_not_given_to_the_transport():
    """The inner communicator works on copies: a call that fails leaves what it was given."""

    def run(comm):
        tensor, kept = torch.full((4,), 7.0), torch.full((4,), 7.0)
        if comm.rank == 0:
            comm.all_reduce(tensor, _C.ReduceOp.SUM)
        else:
            comm.all_reduce(torch.zeros(5), _C.ReduceOp.SUM)
        assert torch.equal(tensor, kept)

    with pytest.raises(AssertionError, match="ranks disagree") as caught:
        through_host(2, run)
    assert str(caught.value).count("BaguaMismatchError") >= 2


def test_messages_of_one_call_lie_on_one_device():
    comm = _C.HostCommunicator(_C.ThreadCommunicator(_C.ThreadHub(1, 1.0), 0))
    here, elsewhere = torch.zeros(2), torch.zeros(2, device="meta")
    with pytest.raises(_C.BaguaError, match=r"exchange: .*cpu.*meta"):
        comm.exchange([(here, 0)], [(elsewhere, 0)])


def test_abort_reaches_the_transport():
    hub = _C.ThreadHub(2, 5.0)
    inner = _C.ThreadCommunicator(hub, 0)
    _C.HostCommunicator(inner).abort("enough")
    with pytest.raises(_C.BaguaError, match="rank 0 of 2 aborted: enough"):
        inner.all_reduce(torch.zeros(1), _C.ReduceOp.SUM)


def test_nothing_to_move_host_memory_with_is_refused():
    with pytest.raises((ValueError, TypeError), match=r"no communicator|incompatible"):
        _C.HostCommunicator(None)
