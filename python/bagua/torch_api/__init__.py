"""The user's surface: ``import bagua.torch_api as bagua``.

``bagua.comm_hooks``, ``bagua.fsdp``, ``bagua.lightning`` and ``bagua.integrations`` are imported
when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bagua import BaguaError, BaguaMismatchError, BaguaTimeoutError
from bagua._core.eager.collectives import (
    allgather,
    allgather_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    gather,
    gather_inplace,
    recv,
    scatter,
    scatter_inplace,
    send,
)
from bagua._core.eager.reductions import (
    allreduce,
    allreduce_inplace,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
)
from bagua._core.group import environment as env
from bagua._core.group.environment import get_local_rank, get_local_size, get_rank, get_world_size
from bagua._core.group.job import destroy_process_group, get_backend, init_process_group
from bagua._core.group.process_group import ReduceOp
from bagua._core.state.bagua_tensor import BaguaTensor
from bagua._watch.per_round import write_stats
from bagua._watch.prometheus import serve_metrics
from bagua.torch_api import _patch, algorithms, checkpoint, communication, contrib, data_parallel
from bagua.torch_api.algorithms import GradientAllReduce
from bagua.torch_api.averaging import average_weights
from bagua.torch_api.distributed import BaguaModule, wrap
from bagua.torch_api.guard import Guard

if TYPE_CHECKING:
    from bagua import (
        comm_hooks as comm_hooks,
        fsdp as fsdp,
        integrations as integrations,
        lightning as lightning,
    )

__all__ = [
    "BaguaError",
    "BaguaMismatchError",
    "BaguaModule",
    "BaguaTensor",
    "BaguaTimeoutError",
    "GradientAllReduce",
    "Guard",
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
    "contrib",
    "data_parallel",
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
    "serve_metrics",
    "wrap",
    "write_stats",
]

_LATER = ("comm_hooks", "fsdp", "integrations", "lightning")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return import_module(f"bagua.{name}")
    if name == "leave":
        return import_module("bagua._outer.leaving").leave
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


_patch.install()
