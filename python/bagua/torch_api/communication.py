"""Process groups and eager collectives: their public address."""

from bagua._core.eager.collectives import (
    allgather as allgather,
    allgather_inplace as allgather_inplace,
    alltoall as alltoall,
    alltoall_inplace as alltoall_inplace,
    alltoall_v as alltoall_v,
    alltoall_v_inplace as alltoall_v_inplace,
    barrier as barrier,
    broadcast as broadcast,
    broadcast_coalesced as broadcast_coalesced,
    gather as gather,
    gather_inplace as gather_inplace,
    recv as recv,
    scatter as scatter,
    scatter_inplace as scatter_inplace,
    send as send,
)
from bagua._core.eager.objects import broadcast_object as broadcast_object
from bagua._core.eager.reductions import (
    allreduce as allreduce,
    allreduce_coalesced_inplace as allreduce_coalesced_inplace,
    allreduce_inplace as allreduce_inplace,
    reduce as reduce,
    reduce_inplace as reduce_inplace,
    reduce_scatter as reduce_scatter,
    reduce_scatter_inplace as reduce_scatter_inplace,
)
from bagua._core.group.job import (
    connect_islands as connect_islands,
    destroy_process_group as destroy_process_group,
    from_torch_group as from_torch_group,
    get_backend as get_backend,
    init_process_group as init_process_group,
    new_group as new_group,
)
from bagua._core.group.process_group import (
    BaguaProcessGroup as BaguaProcessGroup,
    CommMember as CommMember,
    Communicator as Communicator,
    ReduceOp as ReduceOp,
    close_at_exit as close_at_exit,
    comm as comm,
    get_communicator as get_communicator,
    get_default_group as get_default_group,
    is_initialized as is_initialized,
)

# The name in scripts that were written for Bagua.
_get_default_group = get_default_group
