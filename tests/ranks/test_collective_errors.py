"""Invalid arguments of collectives are refused at once, and the group stays usable."""

import datetime
import time

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import communication
from bagua.torch_api.communication import CommMember, ReduceOp
from support import faults, training

TWO, THREE, FOUR = torch.zeros(2), torch.zeros(3), torch.zeros(4)
INTEGERS = torch.zeros(4, dtype=torch.int64)
COLUMNS = torch.zeros(4, 4).t()[:2]
SPARSE = torch.zeros(4).to_sparse()

# On two ranks, each a ValueError on both of them.
WRONG_VALUES = {
    "allreduce_sizes": lambda: bagua.allreduce(FOUR, TWO),
    "allreduce_dtypes": lambda: bagua.allreduce(FOUR, INTEGERS),
    "allreduce_strides": lambda: bagua.allreduce(COLUMNS, torch.zeros(8)),
    "allreduce_inplace_sparse": lambda: bagua.allreduce_inplace(SPARSE),
    "allreduce_inplace_op": lambda: bagua.allreduce_inplace(FOUR, 99),
    "allreduce_coalesced_dtypes": lambda: communication.allreduce_coalesced_inplace(
        [FOUR, INTEGERS]
    ),
    "reduce_sizes": lambda: bagua.reduce(FOUR, TWO, 0),
    "reduce_dst": lambda: bagua.reduce(FOUR, FOUR, 2),
    "reduce_inplace_dst": lambda: bagua.reduce_inplace(FOUR, -1),
    "reduce_scatter_sizes": lambda: bagua.reduce_scatter(FOUR, FOUR),
    "reduce_scatter_inplace_odd": lambda: bagua.reduce_scatter_inplace(THREE),
    "broadcast_src": lambda: bagua.broadcast(FOUR, 2),
    "broadcast_strides": lambda: bagua.broadcast(COLUMNS),
    "broadcast_coalesced_dtypes": lambda: communication.broadcast_coalesced([FOUR, INTEGERS]),
    "broadcast_object_src": lambda: communication.broadcast_object("x", 2),
    "allgather_sizes": lambda: bagua.allgather(FOUR, FOUR),
    "allgather_dtypes": lambda: bagua.allgather(TWO, INTEGERS),
    "allgather_inplace_odd": lambda: bagua.allgather_inplace(THREE),
    "gather_sizes": lambda: bagua.gather(TWO, THREE, 0),
    "gather_dst": lambda: bagua.gather(TWO, FOUR, 2),
    "gather_inplace_count": lambda: bagua.gather_inplace(THREE, 2, 0),
    "gather_inplace_negative": lambda: bagua.gather_inplace(FOUR, -2, 0),
    "scatter_sizes": lambda: bagua.scatter(THREE, TWO, 0),
    "scatter_src": lambda: bagua.scatter(FOUR, TWO, -1),
    "scatter_inplace_count": lambda: bagua.scatter_inplace(THREE, 2, 0),
    "alltoall_sizes": lambda: bagua.alltoall(FOUR, TWO),
    "alltoall_odd": lambda: bagua.alltoall(THREE, torch.zeros(3)),
    "alltoall_inplace_odd": lambda: bagua.alltoall_inplace(THREE),
    "alltoall_v_short": lambda: bagua.alltoall_v(FOUR, [2], [0], FOUR, [2], [0]),
    "alltoall_v_outside": lambda: bagua.alltoall_v(FOUR, [2, 2], [0, 3], FOUR, [2, 2], [0, 2]),
    "alltoall_v_own": lambda: bagua.alltoall_v(FOUR, [2, 2], [0, 2], FOUR, [1, 1], [0, 1]),
    "alltoall_v_inplace_negative": lambda: bagua.alltoall_v_inplace(FOUR, [-1, 2], [0, 2]),
    "send_nobody": lambda: bagua.send(FOUR, 2),
    "send_itself": lambda: bagua.send(FOUR, bagua.get_rank()),
    "recv_itself": lambda: bagua.recv(FOUR, bagua.get_rank()),
}
WRONG_TYPES = {
    "no_tensor": lambda: bagua.allreduce_inplace([1.0, 2.0]),
    "no_rank": lambda: bagua.broadcast(FOUR, "first"),
    "no_count": lambda: bagua.gather_inplace(FOUR, 2.0, 0),
    "no_communicator": lambda: bagua.allreduce_inplace(FOUR, ReduceOp.SUM, dist.group.WORLD),
    "a_group": lambda: bagua.barrier(communication.get_default_group()),
}


@training.with_group
def with_other_counts(size, inplace):
    """The error, and whether all is as before, where rank 1 sends and expects one element more."""
    rank = bagua.get_rank()
    counts = [2 + (rank == 1)] * size
    places = [4 * other for other in range(size)]
    sent, received = torch.arange(4.0 * size), torch.full((4 * size,), -1.0)
    if inplace:
        error = training.error_of(lambda: bagua.alltoall_v_inplace(received, counts, places))
    else:
        error = training.error_of(
            lambda: bagua.alltoall_v(sent, counts, places, received, counts, places)
        )
    counts = [2] * size
    works = received.clone()
    bagua.alltoall_v(sent, counts, places, works, counts, places)
    return error, bool((received == -1).all()), works.tolist()


@pytest.mark.parametrize("inplace", [False, True], ids=["two_tensors", "inplace"])
@pytest.mark.parametrize("size", [2, 3])
def test_counts_that_differ_between_ranks_are_named_on_all_of_them(ranks, size, inplace):
    name = "alltoall_v_inplace" if inplace else "alltoall_v"
    for error, untouched, works in ranks(size, with_other_counts, size, inplace):
        assert error.startswith(f"BaguaMismatchError: {name}: the ranks' counts differ")
        assert "rank 1 sends 3 elements of 4 bytes to rank 0, which expects 2 of 4 bytes" in error
        assert "rank 0 sends 2 elements of 4 bytes to rank 1, which expects 3 of 4 bytes" in error
        assert untouched
        assert [value >= 0 for value in works] == [True, True, False, False] * size


@training.with_group
def with_other_dtypes():
    dtype = torch.float64 if bagua.get_rank() == 1 else torch.float32
    tensor, counts, places = torch.zeros(4, dtype=dtype), [2, 2], [0, 2]
    return training.error_of(
        lambda: bagua.alltoall_v(tensor, counts, places, tensor.clone(), counts, places)
    )


def test_parts_of_other_dtypes_are_named(ranks):
    for error in ranks(2, with_other_dtypes):
        assert "rank 1 sends 2 elements of 8 bytes to rank 0, which expects 2 of 4 bytes" in error


@training.with_group
def make_mistakes(mistakes):
    errors = {}
    for name in mistakes:
        errors[name] = training.error_of({**WRONG_VALUES, **WRONG_TYPES}[name])
        works = torch.ones(2)
        bagua.allreduce_inplace(works)
        assert works.tolist() == [2.0, 2.0], f"after {name} the group does not work"
    return errors


def test_wrong_sizes_and_ranks_are_value_errors_and_nothing_is_sent(ranks):
    first, second = ranks(2, make_mistakes, list(WRONG_VALUES))
    assert [name for name in first if not first[name].startswith("ValueError: ")] == []
    assert [name for name in second if not second[name].startswith("ValueError: ")] == []
    assert first["allreduce_sizes"] == (
        "ValueError: allreduce: recv_tensor has 2 elements, not 4 (as send_tensor)"
    )
    assert "torch.float32 on cpu and torch.int64 on cpu" in first["allreduce_dtypes"]
    assert "not contiguous; pass tensor.contiguous()" in first["broadcast_strides"]
    assert "dst=2 is not a rank of this communicator of 2" in first["reduce_dst"]
    assert "3 elements cannot be shared equally by 2 ranks" in first["alltoall_odd"]
    assert "rank 1's part, 2 elements from 3, goes over" in first["alltoall_v_outside"]
    assert "src=1 is this process itself" in second["recv_itself"]


def test_arguments_of_a_wrong_type_are_a_type_error(ranks):
    for errors in ranks(2, make_mistakes, list(WRONG_TYPES)):
        assert [name for name in errors if not errors[name].startswith("TypeError: ")] == []
        assert "comm must be None or what get_global_communicator()" in errors["a_group"]


def every_collective(comm):
    """Each collective, with arguments that would be refused if they were looked at."""
    odd, more = torch.zeros(3), torch.zeros(5)
    bagua.send(odd, 9, comm)
    bagua.recv(odd, 9, comm)
    bagua.broadcast(odd, 9, comm)
    communication.broadcast_coalesced([odd, more], 9, comm)
    bagua.reduce(odd, more, 9, comm=comm)
    bagua.reduce_inplace(odd, 9, comm=comm)
    bagua.allreduce(odd, more, comm=comm)
    bagua.allreduce_inplace(odd, comm=comm)
    communication.allreduce_coalesced_inplace([odd], comm=comm)
    bagua.allgather(odd, more, comm)
    bagua.allgather_inplace(odd, comm)
    bagua.gather(odd, more, 9, comm)
    bagua.gather_inplace(odd, 1, 9, comm)
    bagua.scatter(odd, more, 9, comm)
    bagua.scatter_inplace(odd, 1, 9, comm)
    bagua.reduce_scatter(odd, more, comm=comm)
    bagua.reduce_scatter_inplace(odd, comm=comm)
    bagua.alltoall(odd, more, comm)
    bagua.alltoall_inplace(odd, comm)
    bagua.alltoall_v(odd, [], [], more, [], [], comm)
    bagua.alltoall_v_inplace(odd, [], [], comm)
    bagua.barrier(comm)
    assert communication.broadcast_object("mine", 9, comm) == "mine"
    return odd.tolist() + more.tolist()


def test_who_is_no_member_takes_no_part_in_any_collective():
    assert every_collective(CommMember.NON_COMM_MEMBER) == [0.0] * 8


def test_before_initialisation_the_error_says_what_to_call():
    message = training.error_of(lambda: bagua.allreduce_inplace(torch.zeros(2)))
    assert message.startswith("RuntimeError")
    assert "call bagua.init_process_group()" in message


def wait_for_one_that_does_not_come():
    bagua.init_process_group(timeout=datetime.timedelta(seconds=20))
    try:
        bagua.barrier()  # connected
        group = communication.BaguaProcessGroup(
            [0, 1],
            "short",
            dist.distributed_c10d._get_default_store(),
            datetime.timedelta(seconds=1),
        )
        communicator = group.get_global_communicator()
        bagua.barrier(communicator)
        start, error = time.monotonic(), None
        if bagua.get_rank() == 0:
            error = training.error_of(lambda: bagua.allreduce_inplace(FOUR, comm=communicator))
        seconds = time.monotonic() - start
        faults.barrier_of_store("over")
        return error, seconds
    finally:
        bagua.destroy_process_group()


def test_a_rank_that_does_not_answer_is_given_up_after_the_timeout(ranks):
    (error, seconds), _ = ranks(2, wait_for_one_that_does_not_come)
    verdict, here = error.split("\n")
    assert verdict == "BaguaTimeoutError: rank 1 is 1 call behind, in call 1: after its barrier"
    assert here.startswith("  Seen here: allreduce_inplace, call 2 on rank 0 of 2, failed: ")
    assert seconds < 10


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
