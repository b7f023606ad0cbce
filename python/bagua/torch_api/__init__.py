"""The user's surface: ``import bagua.torch_api as bagua``."""

from bagua import BaguaError, BaguaMismatchError, BaguaTimeoutError
from bagua.torch_api import _patch, algorithms, checkpoint, communication, env
from bagua.torch_api.algorithms import GradientAllReduce
from bagua.torch_api.averaging import average_weights
from bagua.torch_api.communication import (
    ReduceOp,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    destroy_process_group,
    gather,
    gather_inplace,
    get_backend,
    init_process_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from bagua.torch_api.distributed import BaguaModule
from bagua.torch_api.env import get_local_rank, get_local_size, get_rank, get_world_size
from bagua.torch_api.tensor import BaguaTensor

__all__ = [
    "BaguaError",
    "BaguaMismatchError",
    "BaguaModule",
    "BaguaTensor",
    "BaguaTimeoutError",
    "GradientAllReduce",
    "ReduceOp",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "average_weights",
    "barrier",
    "broadcast",
    "checkpoint",
    "communication",
    "destroy_process_group",
    "env",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]

_patch.install()
