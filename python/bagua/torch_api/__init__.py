"""The user's surface: ``import bagua.torch_api as bagua``."""

from bagua import BaguaError, BaguaMismatchError, BaguaTimeoutError
from bagua.torch_api import _patch, algorithms, communication, env
from bagua.torch_api.algorithms import GradientAllReduce
from bagua.torch_api.communication import (
    barrier,
    destroy_process_group,
    get_backend,
    init_process_group,
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
    "algorithms",
    "barrier",
    "communication",
    "destroy_process_group",
    "env",
    "get_backend",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
]

_patch.install()
