"""CUDA tensors over gloo, as BAGUA_COMM=gloo has it; CPU tensors stand in for them here."""

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua import _C
from bagua._core.group.connections import Connections
from support import training
from support.threads import communicator_conformance as conformance


def connect(device_type):
    """As a lane does for tensors of that type."""
    store = dist.distributed_c10d._get_default_store()
    members = list(range(dist.get_world_size()))
    connections = Connections(store, dist.get_rank(), members, training.TIMEOUT)
    return connections.connect("test", device_type)


def conform():
    comm = connect("cuda")
    conformance.run_all(comm)
    return comm.rank, comm.size


@pytest.mark.parametrize("n", [2], ids=lambda n: f"{n}-ranks")
def test_gloo_ranks_conform_through_host_memory(ranks, n):
    results = ranks(n, conform, env={"BAGUA_COMM": "gloo"}, timeout=100)
    assert results == [(rank, n) for rank in range(n)]


def count_bytes(device_type):
    comm = connect(device_type)
    tensor = torch.ones(300)
    comm.all_reduce(tensor, _C.ReduceOp.SUM)
    comm.exchange([(tensor, 1 - comm.rank)], [(torch.zeros(300), 1 - comm.rank)])
    return comm.traffic()["bytes_sent"], tensor[0].item()


def test_host_memory_is_counted_as_the_tensor_it_carries(ranks):
    env = {"BAGUA_COMM": "gloo"}
    assert ranks(2, count_bytes, "cuda", env=env) == ranks(2, count_bytes, "cpu") == [(2400, 2)] * 2


@training.with_group
def run_eagerly():
    communicator = bagua.communication.get_default_group().get_global_communicator()
    connected = communicator._connect(torch.device("cuda"), None)
    before = communicator.traffic()["bytes_sent"]
    tensor = torch.ones(300)
    connected.all_reduce(tensor, _C.ReduceOp.SUM)
    return tensor[0].item(), communicator.traffic()["bytes_sent"] - before


def test_eager_collectives_of_cuda_tensors_go_over_gloo_too(ranks):
    assert ranks(2, run_eagerly, env={"BAGUA_COMM": "gloo"}) == [(2, 1200)] * 2
