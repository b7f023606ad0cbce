"""Messages between two ranks: they need these two, whatever the other ranks are doing."""

import functools
import time

import bagua.torch_api as bagua
import pytest
import torch
from bagua.torch_api import communication
from ranks.test_groups_and_nodes import environment_of_nodes
from support import faults, training

SHORT = 4.0
SIZES = [1, 7, 300_000]  # the last one is more than a piece of gloo's, see c10d_communicator.cpp
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def numbers(sender, count, dtype=torch.float32):
    return (torch.arange(count) % 100 + 10 * sender).to(dtype)


def pass_message(sender, receiver, count, dtype=torch.float32):
    """One message; returns whether it arrived (True on the sender)."""
    sent = numbers(sender, count, dtype)
    if bagua.get_rank() == sender:
        bagua.send(sent, receiver)
        return True
    received = torch.zeros(count, dtype=dtype)
    bagua.recv(received, sender)
    return torch.equal(received, sent)


def pass_messages(pair):
    """Both ways, several of them in a row, of several sizes and dtypes."""
    ways = [pair, pair[::-1]]
    arrived = [pass_message(*way, count) for count in SIZES for way in ways]
    arrived += [pass_message(*pair, 5, dtype) for dtype in DTYPES]
    return arrived


@functools.partial(faults.with_bagua_group, timeout=SHORT)
def two_of_many(pair):
    """The ranks outside of the pair do nothing until its messages are through."""
    before = pass_messages(pair) if bagua.get_rank() in pair else []
    faults.barrier_of_store("through")
    total = torch.tensor([bagua.get_rank()])
    bagua.allreduce_inplace(total)
    after = pass_messages(pair) if bagua.get_rank() in pair else []
    faults.barrier_of_store("through again")
    bagua.barrier()
    return before + after, total.item()


@pytest.mark.parametrize("pair", [(0, 1), (2, 0)], ids=str)
def test_a_message_between_two_ranks_waits_for_no_other(ranks, pair):
    for rank, (arrived, total) in enumerate(ranks(3, two_of_many, pair)):
        assert len(arrived) == (2 * (2 * len(SIZES) + len(DTYPES)) if rank in pair else 0)
        assert all(arrived)
        assert total == 0 + 1 + 2


@functools.partial(faults.with_bagua_group, timeout=SHORT)
def two_of_a_part(of):
    """Ranks inside the communicator are 0, 1 and 2; the one in the middle does nothing."""
    if of == "group":
        ours = communication.new_group([1, 2, 3]).get_global_communicator()
    else:
        ours = communication.get_default_group().get_intra_node_communicator()
    tensor = torch.tensor([float(bagua.get_rank())])
    if bagua.get_rank() == 3:
        bagua.send(tensor, 0, ours)
    elif bagua.get_rank() == 1:
        bagua.recv(tensor, 2, ours)
    faults.barrier_of_store("through")
    return tensor.item()


@pytest.mark.parametrize("of", ["group", "node"])
def test_the_two_are_counted_inside_the_communicator(ranks, of):
    nodes = environment_of_nodes([1, 3])
    assert ranks(4, two_of_a_part, of, env=nodes) == [0.0, 3.0, 2.0, 3.0]


@functools.partial(faults.with_bagua_group, timeout=SHORT)
def send_to_one_that_does_not_receive():
    error = None
    start = time.monotonic()
    if bagua.get_rank() == 0:
        error = faults.error_of(bagua.send, torch.ones(4), 2)
    seconds = time.monotonic() - start
    faults.barrier_of_store("over")
    return error, seconds


def test_a_receiver_that_does_not_come_is_named_by_its_rank(ranks):
    (error, seconds), *_ = ranks(3, send_to_one_that_does_not_receive)
    verdict, here = error.split("\n", 1)
    assert verdict == (
        "BaguaTimeoutError: rank 2 has not come to this call: its last call was init_process_group"
    )
    assert "Seen here: send, call 1 on rank 0 of 3, failed: between ranks 0 and 2: " in here
    assert SHORT - 1.0 < seconds < SHORT + 5.0


@functools.partial(faults.with_bagua_group, timeout=SHORT)
def leave_out_a_collective_after_messages():
    if bagua.get_rank() in (0, 1):
        pass_messages((0, 1))
    bagua.barrier()
    error = None
    if bagua.get_rank() != 2:
        error = faults.error_of(bagua.allreduce_inplace, torch.ones(4))
    faults.barrier_of_store("over")
    return error


def test_messages_of_two_ranks_do_not_count_as_calls_of_all(ranks):
    first, second, _ = ranks(3, leave_out_a_collective_after_messages)
    for rank, error in enumerate([first, second]):
        assert f"allreduce_inplace, call 2 on rank {rank} of 3, failed" in error
        assert "rank 2 is 1 call behind, in call 1: after its barrier" in error


@training.with_group
def abort_between_two():
    ours = communication.new_group([0, 1, 2]).get_global_communicator()
    if bagua.get_rank() == 2:
        return None
    tensor = torch.ones(1)
    if bagua.get_rank() == 0:
        bagua.send(tensor, 1, ours)
    else:
        bagua.recv(tensor, 0, ours)
    ours.abort()
    return training.error_of(lambda: bagua.send(tensor, 1 - bagua.get_rank(), ours))


def test_an_aborted_communicator_sends_nothing_any_more(ranks):
    error = "BaguaError: send: the communicator was aborted"
    assert ranks(3, abort_between_two) == [error, error, None]
