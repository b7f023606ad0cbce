"""Settings of the launcher: their public address."""

from bagua._core.group.environment import (
    find_free_network_port,
    get_check_weights_every,
    get_checksum,
    get_comm,
    get_default_bucket_size,
    get_local_rank,
    get_local_size,
    get_master_addr,
    get_nccl_library,
    get_node_rank,
    get_rank,
    get_straggler_seconds,
    get_top_seconds,
    get_world_size,
)

__all__ = [
    "find_free_network_port",
    "get_check_weights_every",
    "get_checksum",
    "get_comm",
    "get_default_bucket_size",
    "get_local_rank",
    "get_local_size",
    "get_master_addr",
    "get_nccl_library",
    "get_node_rank",
    "get_rank",
    "get_straggler_seconds",
    "get_top_seconds",
    "get_world_size",
]
