"""Eager collectives that move data: each in both forms, against what each rank must hold."""

import bagua.torch_api as bagua
import torch
from bagua._core.eager.objects import gather_plain_objects
from bagua.torch_api import communication
from support import training
from support.cases import over

SIZES = [1, 2, 3, 4]
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def numbers(rank, count, dtype=torch.float32):
    """Input of `rank`: no element occurs twice on any rank."""
    return (torch.arange(count) + 50 * rank).to(dtype)


def untouched(count, dtype=torch.float32):
    return torch.full((count,), 7).to(dtype)


def moved(rank, size, count, dtype):
    """For each collective its name, what it leaves on this rank, and what it must leave."""
    root = size - 1
    part = slice(rank * count, (rank + 1) * count)
    every = torch.cat([numbers(other, count, dtype) for other in range(size)])
    of_all = [numbers(other, size * count, dtype) for other in range(size)]
    transposed, of_root = torch.cat([whole[part] for whole in of_all]), of_all[root]
    mine, all_mine, of_one = numbers(rank, count, dtype), of_all[rank], numbers(root, count, dtype)
    few, many = untouched(count, dtype), untouched(size * count, dtype)
    held, is_root = many.clone(), rank == root
    held[part] = mine
    for name, call, given, wanted in [
        ("allgather", lambda tensor: bagua.allgather(mine, tensor), many, every),
        ("allgather_inplace", bagua.allgather_inplace, held, every),
        ("alltoall", lambda tensor: bagua.alltoall(all_mine, tensor), many, transposed),
        ("alltoall_inplace", bagua.alltoall_inplace, all_mine, transposed),
        (
            "gather",
            lambda tensor: bagua.gather(mine, tensor, root),
            many,
            every if is_root else many,
        ),
        (
            "gather_inplace",
            lambda tensor: bagua.gather_inplace(tensor, count, root),
            held if is_root else mine,
            every if is_root else mine,
        ),
        ("scatter", lambda tensor: bagua.scatter(all_mine, tensor, root), few, of_root[part]),
        (
            "scatter_inplace",
            lambda tensor: bagua.scatter_inplace(tensor, count, root),
            all_mine if is_root else few,
            of_root if is_root else of_root[part],
        ),
        ("broadcast", lambda tensor: bagua.broadcast(tensor, root), mine, of_one),
    ]:
        tensor = given.clone()
        call(tensor)
        yield name, tensor, wanted
    few, many = mine.clone(), all_mine.clone()
    communication.broadcast_coalesced([few, many.view(size, count).t()], root)
    yield "broadcast_coalesced", few, of_one
    yield "broadcast_coalesced", many, of_root


@training.with_group
def move_all(size):
    cases = [(count, torch.float32) for count in (0, 1, 5)]
    for case in cases + [(3, dtype) for dtype in DTYPES]:
        for name, held, wanted in moved(bagua.get_rank(), size, *case):
            assert held.dtype == wanted.dtype, (name, case)
            assert held.tolist() == wanted.tolist(), (name, case)


@over(size=SIZES)
def test_every_rank_holds_the_collectives_result_of_any_dtype(ranks, size):
    ranks(size, move_all, size)


def unequal_parts(size):
    """Rank i sends i + j elements to rank j, so some send nothing; one element between parts."""
    counts = [[sender + receiver for receiver in range(size)] for sender in range(size)]
    displs = [[sum(row[:part]) + part for part in range(size)] for row in counts]
    return counts, displs


@training.with_group
def exchange_unequal_parts(size, inplace):
    rank = bagua.get_rank()
    counts, displs = unequal_parts(size)  # symmetric: what i sends j is as long as the way back
    length = sum(counts[rank]) + size
    sent = numbers(rank, length)
    if inplace:
        bagua.alltoall_v_inplace(sent, counts[rank], displs[rank])
        return sent.tolist()
    received = untouched(length)
    more = [*counts[rank], 99], [*displs[rank], 99]  # entries after the n-th do not count
    bagua.alltoall_v(sent, *more, received, *more)
    return received.tolist()


@over(size=SIZES, inplace=[False, True])
def test_parts_of_unequal_size_are_exchanged(ranks, size, inplace):
    counts, displs = unequal_parts(size)
    for rank, held in enumerate(ranks(size, exchange_unequal_parts, size, inplace)):
        length = sum(counts[rank]) + size
        wanted = (numbers(rank, length) if inplace else untouched(length)).tolist()
        for other in range(size):
            start, count = displs[other][rank], counts[other][rank]
            place = displs[rank][other]
            theirs = numbers(other, start + count).tolist()
            wanted[place : place + count] = theirs[start:]
        assert held == wanted


class NotPlain:
    """A class that no rank has allowed."""


OBJECTS = {
    "text": "héllo",
    "nothing": None,
    "nested": {"a": [1, 2.5, (True, None)], 3: "x"},
    "tensor": {"weight": torch.arange(6.0).view(2, 3)},
}


@training.with_group
def broadcast_objects(objects):
    rank = bagua.get_rank()
    group = communication.new_group([1, 2])  # ranks inside the communicator are 0 and 1
    inside = group.get_global_communicator()
    results = {}
    for name, thing in objects.items():
        results[name] = communication.broadcast_object(thing if rank == 2 else None, 2)
    results["inside"] = communication.broadcast_object(f"of rank {rank}", 1, inside)
    refused = training.error_of(lambda: communication.broadcast_object(NotPlain(), 0))
    results["after"] = communication.broadcast_object(rank, 1)
    return results, refused


def test_an_object_reaches_every_rank_and_code_does_not(ranks):
    for rank, (results, refused) in enumerate(ranks(3, broadcast_objects, OBJECTS)):
        tensor = results["tensor"]["weight"]
        assert torch.equal(tensor, OBJECTS["tensor"]["weight"])
        for name in ("text", "nothing", "nested"):
            assert results[name] == OBJECTS[name]
        assert results["inside"] == ("of rank 0" if rank == 0 else "of rank 2")
        assert refused.startswith("TypeError: broadcast_object: rank 0's object cannot be sent")
        assert "weights_only" not in refused
        assert (f"it needs {NotPlain.__module__}.NotPlain, which is" in refused) == (rank == 0)
        assert results["after"] == 1


@training.with_group
def gather_objects():
    rank = bagua.get_rank()
    nothing = gather_plain_objects({"tensor": torch.full((rank,), 1.5)}, 1)
    refused = training.error_of(lambda: gather_plain_objects(NotPlain() if rank == 2 else rank, 0))
    return nothing, refused, gather_plain_objects(f"of rank {rank}", 0)


def test_the_objects_of_all_ranks_reach_one_and_code_does_not(ranks):
    results = ranks(3, gather_objects)
    assert [gathered["tensor"].tolist() for gathered in results[1][0]] == [[], [1.5], [1.5] * 2]
    assert [results[rank][0] for rank in (0, 2)] == [None, None]
    for _, refused, _ in results:
        assert refused.startswith(
            "TypeError: gather_plain_objects: the objects of ranks [2] cannot"
        )
    assert [after for *_, after in results] == [["of rank 0", "of rank 1", "of rank 2"], None, None]


@training.with_group
def send_a_parameter():
    parameter = torch.nn.Parameter(torch.full((2, 3), float(bagua.get_rank())))
    bagua.broadcast(parameter, 1)
    bagua.allreduce_inplace(parameter)
    return parameter.requires_grad, parameter.is_leaf, parameter.tolist()


def test_a_parameter_is_changed_in_place_behind_autograds_back(ranks):
    for result in ranks(2, send_a_parameter):
        assert result == (True, True, [[2.0] * 3] * 2)


@training.with_group
def meet():
    bagua.barrier()
    store = torch.distributed.distributed_c10d._get_default_store()
    count = store.add("came", 1)
    bagua.barrier()
    return count, store.add("came", 0)


def test_no_rank_passes_a_barrier_before_the_last_has_come(ranks):
    results = ranks(3, meet)
    assert sorted(count for count, _ in results) == [1, 2, 3]
    assert [total for _, total in results] == [3, 3, 3]
