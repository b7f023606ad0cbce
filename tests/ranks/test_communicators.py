"""Members of communicators: sub-groups, nodes, and ranks outside of them."""

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api import communication
from bagua.torch_api.communication import CommMember, ReduceOp
from ranks.test_groups_and_nodes import environment_of_nodes
from support import training
from support.cases import over


@training.with_group
def ranks_seen(members):
    """Of the group's three communicators: what is gathered, sent by the last rank, the maximum."""
    group = communication.new_group(members)
    seen = []
    for ours in (
        group.get_global_communicator(),
        group.get_intra_node_communicator(),
        group.get_inter_node_communicator(),
    ):
        size = 1 if ours is CommMember.NON_COMM_MEMBER else ours.nranks()
        rank = torch.tensor([bagua.get_rank()])
        gathered, last, highest = torch.full((size,), -1), rank.clone(), rank.clone()
        bagua.allgather(rank, gathered, ours)
        bagua.broadcast(last, size - 1, ours)
        bagua.allreduce_inplace(highest, ReduceOp.MAX, ours)
        bagua.barrier(ours)
        seen.append((gathered.tolist(), last.item(), highest.item()))
        if ours is not CommMember.NON_COMM_MEMBER:
            assert gathered[ours.rank()] == rank
    bagua.allreduce_inplace(rank)  # everybody together, afterwards
    assert rank == sum(range(bagua.get_world_size()))
    return seen


#: Sizes of nodes, members of the group, by rank those of its node, and the nodes' leaders.
GROUPS = [
    ((4,), [0, 2], [[0, 2], None, [0, 2], None], [0]),
    ((4,), [3, 1], [None, [1, 3], None, [1, 3]], [1]),
    ((4,), [2], [None, None, [2], None], [2]),
    ((3,), [0, 1, 2], [[0, 1, 2]] * 3, [0]),
    ((2, 2), [0, 1, 2, 3], [[0, 1], [0, 1], [2, 3], [2, 3]], [0, 2]),
    ((2, 2), [1, 2, 3], [None, [1], [2, 3], [2, 3]], [1, 2]),
    ((3, 1), [0, 1, 2, 3], [[0, 1, 2]] * 3 + [[3]], [0, 3]),
]


@over(case=GROUPS)
def test_ranks_are_counted_inside_and_those_outside_are_untouched(ranks, case):
    sizes, members, intra, leaders = case
    results = ranks(sum(sizes), ranks_seen, members, env=environment_of_nodes(sizes))
    for rank, seen in enumerate(results):
        inside = sorted(members) if rank in members else None
        wanted = (inside, intra[rank], leaders if rank in leaders else None)
        for found, those in zip(seen, wanted, strict=True):
            assert found == ((those, those[-1], those[-1]) if those else ([-1], rank, rank))


@training.with_group
def look_up_communicators():
    group = communication.new_group([0, 1])
    default = communication.get_default_group()
    getters = (
        group.get_global_communicator,
        group.get_inter_node_communicator,
        group.get_intra_node_communicator,
    )
    found = [
        communication.get_communicator(group.group_name, name) is getter()
        for name, getter in zip(("global", "inter", "intra"), getters, strict=True)
    ]
    world = communication.get_communicator(default.group_name, "global")
    tensor = torch.ones(1)
    for everyone in (None, world, communication.comm.WORLD, CommMember.WORLD):
        bagua.allreduce_inplace(tensor, comm=everyone)
    errors = [
        training.error_of(lambda: communication.get_communicator("nobody", "global")),
        training.error_of(lambda: communication.get_communicator(group.group_name, "outer")),
    ]
    return found, tensor.item(), errors


def test_a_communicator_is_found_by_the_names_of_its_group_and_kind(ranks):
    for found, value, errors in ranks(2, look_up_communicators):
        assert found == [True, True, True]
        assert value == 2.0**4
        assert errors[0].startswith("ValueError: get_communicator: there is no group 'nobody'")
        assert "'outer' is none of ['global', 'inter', 'intra']" in errors[1]


@training.with_group
def train_and_communicate():
    model = training.network()
    optimizer = training.sgd(model)
    model.with_bagua([optimizer], training.algorithm("exact"))
    for step in range(3):
        data = training.batch(step, bagua.get_rank())
        optimizer.zero_grad()
        loss = training.squared_error(model, data)
        total = loss.detach().clone()
        bagua.allreduce_inplace(total, ReduceOp.AVG)
        loss.backward()
        bagua.allreduce_inplace(total, ReduceOp.AVG)
        optimizer.step()
    return total.item(), training.model_bits(model)


def test_collectives_between_and_inside_training_steps_do_not_meet_the_steps_messages(ranks):
    first, second = ranks(2, train_and_communicate)
    assert first == second


@training.with_group
def patch_a_torch_group():
    pairs = [dist.new_group([0, 2]), dist.new_group([1])]
    group = pairs[bagua.get_rank() % 2]
    unpatched = training.error_of(lambda: group.bagua_pg)
    patched = group.bagua_patch(stream="remembered")
    again = group.bagua_patch().bagua_pg
    tensor = torch.tensor([bagua.get_rank()])
    bagua.allreduce_inplace(tensor, comm=group.bagua_get_global_communicator())
    nodes = [
        group.bagua_get_inter_node_communicator(),
        group.bagua_get_intra_node_communicator(),
    ]
    sizes = [c if c is CommMember.NON_COMM_MEMBER else c.nranks() for c in nodes]
    ours = group.bagua_pg
    return unpatched, patched is group, again is ours, ours.stream, ours.ranks, tensor.item(), sizes


def test_a_torch_group_is_patched_once_and_communicates_by_itself(ranks):
    results = ranks(3, patch_a_torch_group)
    expected = [
        ([0, 2], 2, [1, 2]),
        ([1], 1, [1, 1]),
        ([0, 2], 2, [CommMember.NON_COMM_MEMBER, 2]),
    ]
    for (unpatched, same, once, stream, *seen), wanted in zip(results, expected, strict=True):
        assert unpatched.startswith("RuntimeError")
        assert "call group.bagua_patch() first" in unpatched
        assert (same, once, stream) == (True, True, "remembered")
        assert tuple(seen) == wanted


ENDS_AT_ONCE = """
import bagua.torch_api as bagua
import torch
from bagua.torch_api import communication
bagua.init_process_group()
group = communication.new_group([0, 1])
keep = [group, group.get_global_communicator()]
tensor = torch.full((100_000,), float(bagua.get_rank()))
bagua.allreduce_inplace(tensor)
bagua.broadcast(tensor, 1, keep[1])
print("sum", tensor[0].item())
"""


def test_a_script_that_ends_after_its_last_collective_ends_well(run_script):
    for ended in run_script(2, ENDS_AT_ONCE):
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "sum 1.0\n", "")
