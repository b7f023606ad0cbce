"""One rank on a communicator of NCCL of its own: all that a single GPU can show of it.

On a GPU through the libnccl of torch, on the CPU through the fake one.
"""

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from support.devices import delay, each_device
from support.programs.fake_nccl import CPU, FakeNccl
from support.threads import communicator_conformance as conformance

SUM = _C.ReduceOp.SUM
pytestmark = pytest.mark.skipif(not _C.has_nccl, reason="this build has no nccl.h")


@pytest.fixture
def connect():
    """connect(device): a communicator of one rank that goes through NCCL."""
    fakes = []

    def connected(kind):
        if kind == "cuda":
            library, device = _C.NcclLibrary.find([]), torch.device("cuda", 0)
        else:
            fakes.append(FakeNccl())
            fakes[0].reset()
            library, device = fakes[0].library, CPU
        return _C.NcclCommunicator(library, dist.HashStore(), 0, 1, device, 60.0, alone_too=True)

    yield connected
    for fake in fakes:
        assert fake.calls_of("ncclAllReduce") + fake.calls_of("ncclSend") > 0
        assert fake.misuse().decode() == ""


@each_device
def test_one_rank_conforms_through_nccl_and_ends(connect, device):
    comm = connect(device)
    conformance.run_all(comm, torch.device(device, 0) if device == "cuda" else device)
    assert comm.failure() is None
    del comm  # is finalised and destroyed


@each_device
def test_messages_of_a_rank_to_itself_go_through_nccl(connect, device):
    comm = connect(device)
    sent = [torch.randn(n, device=device) for n in (1, 1000, 0, 100_000)]
    received = [torch.zeros_like(tensor) for tensor in sent]
    comm.exchange([(tensor, 0) for tensor in sent], [(tensor, 0) for tensor in received])
    for ours, theirs in zip(received, sent, strict=True):
        assert torch.equal(ours, theirs)


@each_device
def test_a_split_of_one_rank_outlives_its_parent(connect, device):
    comm = connect(device)
    child = comm.split([0])
    comm.abort("enough")
    tensor = torch.full((1000,), 3.0, device=device)
    child.all_reduce(tensor, SUM)
    child.broadcast(tensor, 0)
    assert tensor.eq(3).all()
    assert child.failure() is None


@each_device
def test_an_abort_behind_a_busy_device_leaves_nan(connect, device):
    comm = connect(device)
    tensor = torch.ones(1000, device=device)
    delay(device)
    comm.all_reduce(tensor, SUM)
    comm.abort("enough")
    comm.invalidate_if_aborted(tensor)
    assert tensor.isnan().all()
    assert comm.failure() == "aborted: enough"
    with pytest.raises(_C.BaguaError, match="all_reduce refused: aborted: enough"):
        comm.all_reduce(tensor, SUM)
