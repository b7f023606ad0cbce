"""Settings of the launcher: their public address."""

from bagua._core.group.environment import (
    find_free_network_port as find_free_network_port,
    get_check_weights_every as get_check_weights_every,
    get_checksum as get_checksum,
    get_comm as get_comm,
    get_default_bucket_size as get_default_bucket_size,
    get_local_rank as get_local_rank,
    get_local_size as get_local_size,
    get_master_addr as get_master_addr,
    get_nccl_library as get_nccl_library,
    get_node_rank as get_node_rank,
    get_rank as get_rank,
    get_straggler_seconds as get_straggler_seconds,
    get_top_seconds as get_top_seconds,
    get_world_size as get_world_size,
)
