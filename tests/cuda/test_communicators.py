"""Communicators with tensors of a GPU: conformance on one, and on all that there are.

One rank each GPU: with one GPU NCCL has one rank, and the transports that do not mind a shared GPU
(threads, and gloo through host memory) have several.
"""

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from bagua._core.group.connections import Connections
from support import training
from support.devices import each_device, ranks_on
from support.shared_gpu import hosts_that_share_a_gpu
from support.threads import communicator_conformance as conformance
from support.threads.thread_ranks import run_thread_ranks

PER_RANKS = pytest.mark.parametrize("n", [1, 2, 3], ids=lambda n: f"{n}-ranks")


@each_device
@PER_RANKS
def test_thread_ranks_that_share_a_device_conform(n, device):
    run_thread_ranks(n, conformance.run_all, device, timeout=60.0)


@each_device
@PER_RANKS
def test_thread_ranks_conform_through_host_memory(n, device):
    def run(comm):
        conformance.run_all(_C.HostCommunicator(comm), device)

    run_thread_ranks(n, run, timeout=60.0)


@training.with_group
def conform(device_type):
    """Over what a lane on this device would be connected to."""
    device = training.device()  # the current one from now on
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    connections = Connections(store, rank, list(range(size)), training.TIMEOUT)
    comm = connections.connect("conformance", device_type)
    conformance.run_all(comm, device)
    return comm.rank, comm.size


@each_device
@pytest.mark.parametrize("n", [2, 3], ids=lambda n: f"{n}-ranks")
def test_processes_that_share_a_gpu_conform_over_gloo(ranks, n, device):
    results = ranks(n, conform, device, env=training.on_device(device), timeout=100)
    assert results == [(rank, n) for rank in range(n)]


@pytest.mark.needs_cuda
@pytest.mark.parametrize("comm", ["nccl", "c10d"])
def test_one_process_on_each_gpu_conforms_over_nccl(ranks, comm):
    n = ranks_on("nccl")
    env = {"TEST_DEVICE": "cuda", "BAGUA_COMM": comm}
    results = ranks(n, conform, "cuda", env=env, timeout=100)
    assert results == [(rank, n) for rank in range(n)]


@pytest.mark.needs_cuda
def test_two_processes_that_claim_to_be_two_hosts_conform_over_nccl_on_one_gpu(ranks):
    # Fresh processes: CUDA and NCCL read their variables once.
    results = ranks(2, conform, "cuda", env=hosts_that_share_a_gpu(2), timeout=200, fresh=True)
    assert results == [(rank, 2) for rank in range(2)]


@pytest.mark.needs_cuda
def test_a_group_of_one_conforms_on_nccls_communicator():
    if not getattr(_C, "has_nccl", False):
        pytest.fail("bagua was built without NCCL: see docs/cuda.md", pytrace=False)
    library = _C.NcclLibrary.find([])  # torch's, which has been loaded
    device = torch.device("cuda", 0)
    comm = _C.NcclCommunicator(library, dist.HashStore(), 0, 1, device, 60.0)
    conformance.run_all(comm, device)
    assert comm.failure() is None
