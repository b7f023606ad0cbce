"""Process groups and eager collectives: their public address."""

from bagua._core.eager.collectives import (
    allgather,
    allgather_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    broadcast_coalesced,
    gather,
    gather_inplace,
    recv,
    scatter,
    scatter_inplace,
    send,
)
from bagua._core.eager.objects import (
    broadcast_object,
)
from bagua._core.eager.reductions import (
    allreduce,
    allreduce_coalesced_inplace,
    allreduce_inplace,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
)
from bagua._core.group.job import (
    connect_islands,
    destroy_process_group,
    from_torch_group,
    get_backend,
    init_process_group,
    new_group,
)
from bagua._core.group.process_group import (
    BaguaProcessGroup,
    CommMember,
    Communicator,
    ReduceOp,
    close_at_exit,
    comm,
    get_communicator,
    get_default_group,
    is_initialized,
)

# The name in scripts that were written for Bagua.
_get_default_group = get_default_group

__all__ = [
    "BaguaProcessGroup",
    "CommMember",
    "Communicator",
    "ReduceOp",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "close_at_exit",
    "comm",
    "connect_islands",
    "destroy_process_group",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_communicator",
    "get_default_group",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]
