"""Eager collectives go over bagua's own communicators: they are counted, and BAGUA_COMM holds."""

import bagua.torch_api as bagua
import torch
from bagua import _C
from bagua._core.group.connections import Connections
from bagua.torch_api import ReduceOp, communication
from support import training

N = 3
PART = 40  # elements of four bytes
WHOLE = N * PART


def message(part, whole):
    if bagua.get_rank() == 0:
        bagua.send(part, 2)
    if bagua.get_rank() == 2:
        bagua.recv(part, 0)


# Calls with a part and a whole tensor, and the bytes that each rank sends: what the algorithms
# need, of 160 bytes a part.
CALLS = {
    "allreduce": (lambda part, whole: bagua.allreduce_inplace(whole, ReduceOp.AVG), [640] * N),
    "reduce": (lambda part, whole: bagua.reduce_inplace(whole, 1), [640] * N),
    "allreduce_product": (
        lambda part, whole: bagua.allreduce_inplace(whole, ReduceOp.PRODUCT),
        [640] * N,
    ),
    # Floats: an all-reduce, as torch's.
    "reduce_scatter": (lambda part, whole: bagua.reduce_scatter(whole, part), [640] * N),
    "reduce_scatter_integers": (
        lambda part, whole: bagua.reduce_scatter(whole.int(), part.int(), ReduceOp.MAX),
        [320] * N,
    ),
    "allgather": (lambda part, whole: bagua.allgather(part, whole), [320] * N),
    "alltoall": (lambda part, whole: bagua.alltoall_inplace(whole), [320] * N),
    "broadcast": (lambda part, whole: bagua.broadcast(whole, 0), [960, 0, 0]),
    "gather": (lambda part, whole: bagua.gather(part, whole, 0), [0, 160, 160]),
    "scatter": (lambda part, whole: bagua.scatter(whole, part, 0), [320, 0, 0]),
    "message": (message, [160, 0, 0]),
    "nothing": (lambda part, whole: None, [0] * N),
}


@training.with_group
def bytes_of_calls():
    communicator = communication.get_default_group().get_global_communicator()
    unused = communicator.traffic()
    bagua.barrier()
    bagua.allreduce_inplace(torch.ones(1))  # sums of floats have connections of their own
    sent, received = {}, {}
    for name, (call, _) in CALLS.items():
        before = communicator.traffic()
        call(torch.ones(PART), torch.ones(WHOLE))
        after = communicator.traffic()
        sent[name] = after["bytes_sent"] - before["bytes_sent"]
        received[name] = after["bytes_received"] - before["bytes_received"]
    return unused, sent, received, communicator.traffic()


def test_every_collective_and_every_message_is_counted(ranks):
    results = ranks(N, bytes_of_calls)
    for name, (_, wanted) in CALLS.items():
        assert [sent[name] for _, sent, _, _ in results] == wanted, name
        assert sum(received[name] for _, _, received, _ in results) == sum(wanted), name
    for unused, _, _, total in results:
        assert set(unused.values()) == {0}
        assert unused.keys() == total.keys()
        assert total["wire_ns"] > 0
        assert total["messages_sent"] > 0


@training.with_group
def connect_as_told():
    """No NCCL here: gloo stands in for what would be connected."""
    asked = []

    def nccl(connections, name, device, members):
        asked.append((name, members))
        return _C.C10dCommunicator(connections.backend(name, "cpu", members))

    real, Connections._nccl = Connections._nccl, nccl
    try:
        communicator = communication.get_default_group().get_global_communicator()
        if bagua.get_rank() != 1:
            communicator._connect(torch.device("cuda"), 2 - bagua.get_rank())
        connected = communicator._connect(torch.device("cuda"), None)
    finally:
        Connections._nccl = real
    tensor = torch.ones(2)
    connected.all_reduce(tensor, _C.ReduceOp.SUM)
    return asked, tensor.tolist()


def test_eager_collectives_of_cuda_tensors_use_the_transport_of_bagua_comm(ranks):
    results = ranks(N, connect_as_told, env={"BAGUA_COMM": "nccl"})
    for rank, (asked, total) in enumerate(results):
        pair = [] if rank == 1 else [("eager/global/cuda/pair", [0, 2])]
        assert asked == [*pair, ("eager/global/cuda", [0, 1, 2])]
        assert total == [3.0, 3.0]
