"""Invalid arguments of collectives are refused at once, and the group stays usable."""

import functools

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api import communication
from bagua.torch_api.communication import CommMember, ReduceOp
from support import training
from support.cases import over

TWO, THREE, FOUR = torch.zeros(2), torch.zeros(3), torch.zeros(4)
INTEGERS = torch.zeros(4, dtype=torch.int64)
COLUMNS = torch.zeros(4, 4).t()[:2]
SPARSE = torch.zeros(4).to_sparse()

#: Calls on a communicator of two ranks, each a ValueError on both of them.
WRONG_VALUES = {
    "allreduce_sizes": lambda c: bagua.allreduce(FOUR, TWO, comm=c),
    "allreduce_dtypes": lambda c: bagua.allreduce(FOUR, INTEGERS, comm=c),
    "allreduce_strides": lambda c: bagua.allreduce(COLUMNS, torch.zeros(8), comm=c),
    "allreduce_inplace_sparse": lambda c: bagua.allreduce_inplace(SPARSE, comm=c),
    "allreduce_inplace_op": lambda c: bagua.allreduce_inplace(FOUR, 99, comm=c),
    "allreduce_coalesced_dtypes": lambda c: communication.allreduce_coalesced_inplace(
        [FOUR, INTEGERS], comm=c
    ),
    "reduce_sizes": lambda c: bagua.reduce(FOUR, TWO, 0, comm=c),
    "reduce_dst": lambda c: bagua.reduce(FOUR, FOUR, 2, comm=c),
    "reduce_inplace_dst": lambda c: bagua.reduce_inplace(FOUR, -1, comm=c),
    "reduce_scatter_sizes": lambda c: bagua.reduce_scatter(FOUR, FOUR, comm=c),
    "reduce_scatter_inplace_odd": lambda c: bagua.reduce_scatter_inplace(THREE, comm=c),
    "broadcast_src": lambda c: bagua.broadcast(FOUR, 2, comm=c),
    "broadcast_strides": lambda c: bagua.broadcast(COLUMNS, comm=c),
    "broadcast_coalesced_dtypes": lambda c: communication.broadcast_coalesced(
        [FOUR, INTEGERS], comm=c
    ),
    "broadcast_object_src": lambda c: communication.broadcast_object("x", 2, comm=c),
    "allgather_sizes": lambda c: bagua.allgather(FOUR, FOUR, comm=c),
    "allgather_dtypes": lambda c: bagua.allgather(TWO, INTEGERS, comm=c),
    "allgather_inplace_odd": lambda c: bagua.allgather_inplace(THREE, comm=c),
    "gather_sizes": lambda c: bagua.gather(TWO, THREE, 0, comm=c),
    "gather_dst": lambda c: bagua.gather(TWO, FOUR, 2, comm=c),
    "gather_inplace_count": lambda c: bagua.gather_inplace(THREE, 2, 0, comm=c),
    "gather_inplace_negative": lambda c: bagua.gather_inplace(FOUR, -2, 0, comm=c),
    "scatter_sizes": lambda c: bagua.scatter(THREE, TWO, 0, comm=c),
    "scatter_src": lambda c: bagua.scatter(FOUR, TWO, -1, comm=c),
    "scatter_inplace_count": lambda c: bagua.scatter_inplace(THREE, 2, 0, comm=c),
    "alltoall_sizes": lambda c: bagua.alltoall(FOUR, TWO, comm=c),
    "alltoall_odd": lambda c: bagua.alltoall(THREE, torch.zeros(3), comm=c),
    "alltoall_inplace_odd": lambda c: bagua.alltoall_inplace(THREE, comm=c),
    "alltoall_v_short": lambda c: bagua.alltoall_v(FOUR, [2], [0], FOUR, [2], [0], comm=c),
    "alltoall_v_outside": lambda c: bagua.alltoall_v(
        FOUR, [2, 2], [0, 3], FOUR, [2, 2], [0, 2], comm=c
    ),
    "alltoall_v_own": lambda c: bagua.alltoall_v(
        FOUR, [2, 2], [0, 2], FOUR, [1, 1], [0, 1], comm=c
    ),
    "alltoall_v_inplace_negative": lambda c: bagua.alltoall_v_inplace(
        FOUR, [-1, 2], [0, 2], comm=c
    ),
    "send_nobody": lambda c: bagua.send(FOUR, 2, comm=c),
    "send_itself": lambda c: bagua.send(FOUR, bagua.get_rank(), comm=c),
    "recv_itself": lambda c: bagua.recv(FOUR, bagua.get_rank(), comm=c),
}
WRONG_TYPES = {
    "no_tensor": lambda: bagua.allreduce_inplace([1.0, 2.0]),
    "no_rank": lambda: bagua.broadcast(FOUR, "first"),
    "no_count": lambda: bagua.gather_inplace(FOUR, 2.0, 0),
    "no_communicator": lambda: bagua.allreduce_inplace(FOUR, ReduceOp.SUM, dist.group.WORLD),
    "a_group": lambda: bagua.barrier(communication.get_default_group()),
}


@training.with_group
def exchange_differing_parts(size):
    """Rank 1 sends and expects one element more, in two tensors and in one, then wider ones."""
    one_more = bagua.get_rank() == 1
    counts, places = [2 + one_more] * size, [4 * other for other in range(size)]
    sent, received = torch.arange(4.0 * size), torch.full((4 * size,), -1.0)
    wider = sent.to(torch.float64 if one_more else torch.float32, copy=True)
    errors = [
        training.error_of(lambda: bagua.alltoall_v(sent, counts, places, received, counts, places)),
        training.error_of(lambda: bagua.alltoall_v_inplace(received, counts, places)),
        training.error_of(lambda: bagua.alltoall_v_inplace(wider, [2] * size, places)),
    ]
    untouched = bool((received == -1).all())
    bagua.alltoall_v(sent, [2] * size, places, received, [2] * size, places)
    return errors, untouched, received.tolist()


@over(size=[2, 3])
def test_parts_that_differ_between_ranks_are_named_on_all_of_them(ranks, size):
    for (*counts, dtypes), untouched, works in ranks(size, exchange_differing_parts, size):
        for name, error in zip(("alltoall_v", "alltoall_v_inplace"), counts, strict=True):
            assert error.startswith(f"BaguaMismatchError: {name}: the ranks' counts differ")
            for words in (
                "rank 1 sends 3 elements of 4 bytes to rank 0, which expects 2 of 4 bytes",
                "rank 0 sends 2 elements of 4 bytes to rank 1, which expects 3 of 4 bytes",
            ):
                assert words in error
        assert "rank 1 sends 2 elements of 8 bytes to rank 0, which expects 2 of 4 bytes" in dtypes
        assert untouched
        assert [value >= 0 for value in works] == [True, True, False, False] * size


#: A part of some of the errors.
SAID = {
    "allreduce_sizes": "allreduce: recv_tensor has 2 elements, not 4 (as send_tensor)",
    "allreduce_dtypes": "torch.float32 on cpu and torch.int64 on cpu",
    "broadcast_strides": "not contiguous; pass tensor.contiguous()",
    "reduce_dst": "dst=2 is not a rank of this communicator of 2",
    "alltoall_odd": "3 elements cannot be shared equally by 2 ranks",
    "alltoall_v_outside": "rank 1's part, 2 elements from 3, goes over",
    "recv_itself": "is this process itself",
    "a_group": "comm must be None or what get_global_communicator()",
}


@training.with_group
def make_mistakes():
    errors = {}
    world = communication.get_default_group().get_global_communicator()
    mistakes = {name: functools.partial(call, world) for name, call in WRONG_VALUES.items()}
    for name, mistake in (mistakes | WRONG_TYPES).items():
        errors[name] = training.error_of(mistake)
        works = torch.ones(2)
        bagua.allreduce_inplace(works)
        assert works.tolist() == [2.0, 2.0], f"after {name} the group does not work"
    return errors


def test_wrong_arguments_are_told_at_once_and_nothing_is_sent(ranks):
    for errors in ranks(2, make_mistakes):
        for name, error in errors.items():
            kind = "TypeError" if name in WRONG_TYPES else "ValueError"
            assert error.startswith(f"{kind}: "), name
            assert SAID.get(name, "") in error


def test_who_is_no_member_takes_no_part_in_any_collective():
    for name, mistake in WRONG_VALUES.items():
        if not name.endswith("_itself"):
            mistake(CommMember.NON_COMM_MEMBER)
    bagua.barrier(CommMember.NON_COMM_MEMBER)
    assert communication.broadcast_object("mine", 9, CommMember.NON_COMM_MEMBER) == "mine"
    assert not any(tensor.any() for tensor in (TWO, THREE, FOUR))


def test_before_initialisation_the_error_says_what_to_call():
    message = training.error_of(lambda: bagua.allreduce_inplace(torch.zeros(2)))
    assert message.startswith("RuntimeError")
    assert "call bagua.init_process_group()" in message


@training.with_group
def abort_one_of_two():
    ours = communication.new_group([0, 1]).get_global_communicator()
    tensor = torch.ones(1)
    bagua.allreduce_inplace(tensor, comm=ours)
    before = ours.check_abort()
    ours.abort()
    error = training.error_of(lambda: bagua.allreduce_inplace(tensor, comm=ours))
    bagua.allreduce_inplace(tensor)
    return before, ours.check_abort(), error, tensor.item()


def test_an_aborted_communicator_refuses_and_others_go_on(ranks):
    for before, after, error, value in ranks(2, abort_one_of_two):
        assert (before, after) == (False, True)
        assert error == "BaguaError: allreduce_inplace: the communicator was aborted"
        assert value == 4.0


def use_after_destruction():
    bagua.init_process_group()
    ours = communication.get_default_group().get_global_communicator()
    bagua.barrier(ours)
    bagua.destroy_process_group()
    return training.error_of(lambda: bagua.barrier(ours))


def test_a_communicator_of_a_destroyed_group_says_so(ranks):
    error = "BaguaError: barrier: the process group was destroyed"
    assert ranks(2, use_after_destruction) == [error] * 2
