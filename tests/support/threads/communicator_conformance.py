"""The contract of every communicator: checks that a rank runs on its communicator.

Every rank of the group calls the same check with the same arguments. Values are small integers, so
that sums are exact in every dtype and can be compared without a tolerance. Tensors are on torch's
default device, which `run_all` sets.
"""

import pytest
import torch
from bagua import _C

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
    "u8": torch.uint8,
    "i64": torch.int64,
}
SIZES = [0, 1, 31, 4096, 4099]
# In f32 more than one of gloo's pieces of 1 MiB, and not a multiple of them.
LARGE_SIZE = (1 << 18) + 4099

REDUCE_OPS = {
    _C.ReduceOp.SUM: lambda stack: stack.sum(0, dtype=stack.dtype),
    _C.ReduceOp.MIN: lambda stack: stack.amin(0),
    _C.ReduceOp.MAX: lambda stack: stack.amax(0),
}


def values(rank, numel, dtype, salt=0):
    """What `rank` brings: integers from 0 to 15, different for each rank and position."""
    position = torch.arange(numel)
    return ((position * 7 + (position // 16) * 3 + rank * 5 + salt) % 16).to(dtype)


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_same_bits_everywhere(comm, tensor):
    mine = tensor.contiguous().view(torch.uint8)
    all_ranks = torch.empty(comm.size * mine.numel(), dtype=torch.uint8)
    comm.all_gather(mine, all_ranks)
    for other in all_ranks.view(comm.size, -1):
        assert torch.equal(other, mine), "ranks hold different bits"


def all_reduce_joins_all_ranks(comm, dtype, numel):
    stack = torch.stack([values(r, numel, dtype) for r in range(comm.size)])
    for op, join in REDUCE_OPS.items():
        tensor = values(comm.rank, numel, dtype)
        comm.all_reduce(tensor, op)
        assert_equal(tensor, join(stack) if numel else tensor)


def all_reduce_average_has_the_same_bits_everywhere(comm, dtype, numel):
    if not dtype.is_floating_point:
        return
    generator = torch.Generator().manual_seed(1)
    stack = torch.randn(comm.size, numel, generator=generator, device="cpu")
    stack = stack.to(torch.get_default_device(), dtype)
    tensor = stack[comm.rank].clone()
    comm.all_reduce(tensor, _C.ReduceOp.AVG)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-6)
    expected = stack.double().mean(0).to(dtype)
    torch.testing.assert_close(tensor, expected, rtol=tolerance, atol=tolerance)
    assert_same_bits_everywhere(comm, tensor)


def all_gather_puts_rank_i_into_slot_i(comm, dtype, numel):
    expected = torch.cat([values(r, numel, dtype) for r in range(comm.size)])
    output = torch.full((comm.size * numel,), 99, dtype=dtype)
    comm.all_gather(values(comm.rank, numel, dtype), output)
    assert_equal(output, expected)

    own_slot = output.view(comm.size, numel)[comm.rank]
    others = [r for r in range(comm.size) if r != comm.rank]
    output.view(comm.size, numel)[others] = 99
    comm.all_gather(own_slot, output)
    assert_equal(output, expected)


def all_to_all_transposes_chunks(comm, dtype, chunk):
    def sent(rank):
        return values(rank, comm.size * chunk, dtype)

    output = torch.full((comm.size * chunk,), 99, dtype=dtype)
    comm.all_to_all(sent(comm.rank), output)
    mine = slice(comm.rank * chunk, (comm.rank + 1) * chunk)
    assert_equal(output, torch.cat([sent(r)[mine] for r in range(comm.size)]))


def broadcast_gives_the_values_of_every_root(comm, dtype, numel):
    for root in range(comm.size):
        tensor = values(comm.rank, numel, dtype, salt=root)
        comm.broadcast(tensor, root)
        assert_equal(tensor, values(root, numel, dtype, salt=root))


def exchange_serves_both_neighbours_of_a_ring(comm, dtype, numel):
    left = (comm.rank - 1) % comm.size
    right = (comm.rank + 1) % comm.size
    from_left = torch.full((numel,), 99, dtype=dtype)
    from_right = torch.full((numel,), 99, dtype=dtype)
    mine = values(comm.rank, numel, dtype)
    # Clockwise first on both lists: with two ranks both messages go to the same peer, in order.
    comm.exchange([(mine, right), (mine + 1, left)], [(from_left, left), (from_right, right)])
    assert_equal(from_left, values(left, numel, dtype))
    assert_equal(from_right, values(right, numel, dtype) + 1)


def exchange_keeps_the_order_of_messages_between_two_ranks(comm, dtype, numel):
    peer = comm.size - 1 - comm.rank  # the middle rank of an odd group: itself
    received = [torch.full((numel + i,), 99, dtype=dtype) for i in range(3)]
    sent = [values(comm.rank, numel + i, dtype, salt=i) for i in range(3)]
    comm.exchange([(t, peer) for t in sent], [(t, peer) for t in received])
    for i, tensor in enumerate(received):
        assert_equal(tensor, values(peer, numel + i, dtype, salt=i))


def exchange_serves_one_sender_and_many_receivers(comm, dtype, numel):
    if comm.rank == 0:
        mine = values(0, numel, dtype)
        comm.exchange([(mine, peer) for peer in range(1, comm.size)], [])
        return
    received = torch.full((numel,), 99, dtype=dtype)
    comm.exchange([], [(received, 0)])
    assert_equal(received, values(0, numel, dtype))


def exchanges_receive_what_was_expected(comm, dtype, numel):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    received = [torch.full((numel,), 99, dtype=dtype) for _ in range(2)]
    for tensor in received:
        comm.expect([(tensor, left)])
    for salt, tensor in enumerate(received):
        comm.exchange([(values(comm.rank, numel, dtype, salt), right)], [(tensor, left)])
        assert_equal(tensor, values(left, numel, dtype, salt))


def exchange_pairs_ranks_and_lets_one_sit_out(comm, dtype, numel):
    for step in range(3):
        peer = _C.shift_one_peer(comm.rank, comm.size, step)
        if peer == comm.rank:
            continue
        received = torch.full((numel,), 99, dtype=dtype)
        comm.exchange([(values(comm.rank, numel, dtype, step), peer)], [(received, peer)])
        assert_equal(received, values(peer, numel, dtype, step))


CHECKS = [
    all_reduce_joins_all_ranks,
    all_reduce_average_has_the_same_bits_everywhere,
    all_gather_puts_rank_i_into_slot_i,
    all_to_all_transposes_chunks,
    broadcast_gives_the_values_of_every_root,
    exchange_serves_both_neighbours_of_a_ring,
    exchange_keeps_the_order_of_messages_between_two_ranks,
    exchange_serves_one_sender_and_many_receivers,
    exchange_pairs_ranks_and_lets_one_sit_out,
    exchanges_receive_what_was_expected,
]


def tensors_of_any_shape_and_views_of_parameters_are_moved_in_place(comm):
    parameter = torch.nn.Parameter(torch.full((3, 5), float(comm.rank)))
    comm.all_reduce(parameter, _C.ReduceOp.SUM)
    assert_equal(parameter.detach(), torch.full((3, 5), float(sum(range(comm.size)))))
    bucket = torch.full((10,), float(comm.rank))
    comm.broadcast(bucket[2:5], comm.size - 1)
    expected = torch.full((10,), float(comm.rank))
    expected[2:5] = comm.size - 1
    assert_equal(bucket, expected)


def bool_tensors_join_by_any_and_all(comm):
    for op, expected in [(_C.ReduceOp.MAX, True), (_C.ReduceOp.MIN, comm.size == 1)]:
        flag = torch.tensor([comm.rank == 0])
        comm.all_reduce(flag, op)
        assert flag.item() is expected


def wrong_arguments_are_refused_and_leave_the_group_usable(comm):
    floats = torch.zeros(comm.size * 2)
    refused = [
        (r"dense and contiguous", lambda: comm.all_reduce(torch.zeros(4, 4).t(), _C.ReduceOp.SUM)),
        (r"avg needs a floating", lambda: comm.all_reduce(torch.zeros(2).int(), _C.ReduceOp.AVG)),
        (r"bool has no sum", lambda: comm.all_reduce(torch.zeros(2).bool(), _C.ReduceOp.SUM)),
        (r"needs an output of", lambda: comm.all_gather(torch.zeros(3), floats)),
        (r"float32.*output is int32", lambda: comm.all_gather(torch.zeros(2), floats.int())),
        (r"equal numel, divisible", lambda: comm.all_to_all(floats, torch.zeros(1))),
        (r"rank 99 is outside", lambda: comm.broadcast(floats, 99)),
        (r"rank -1 is outside", lambda: comm.exchange([(floats, -1)], [])),
        (r"itself has no receive", lambda: comm.exchange([(floats, comm.rank)], [])),
        (r"itself has no send", lambda: comm.exchange([], [(floats, comm.rank)])),
    ]
    for message, call in refused:
        with pytest.raises(_C.BaguaError, match=message):
            call()
    broadcast_gives_the_values_of_every_root(comm, torch.float32, 3)


ONCE = [
    tensors_of_any_shape_and_views_of_parameters_are_moved_in_place,
    bool_tensors_join_by_any_and_all,
    wrong_arguments_are_refused_and_leave_the_group_usable,
]


def run_all(comm, device="cpu"):
    """Every check with every dtype and with every size; an assertion says which one failed.

    Returns (rank, size) of the communicator.
    """
    with torch.device(device):
        _run_all(comm)
    return comm.rank, comm.size


def _run_all(comm):
    cases = [(dtype, 31) for dtype in DTYPES.values()]
    cases += [(torch.float32, size) for size in [*SIZES, LARGE_SIZE]]
    for check in CHECKS:
        for dtype, size in cases:
            try:
                check(comm, dtype, size)
            except AssertionError as error:
                raise AssertionError(f"{check.__name__} of {size} {dtype}: {error}") from error
    for check in ONCE:
        check(comm)


def all_reduce(numel, dtype=torch.float32, op=_C.ReduceOp.SUM):
    return lambda comm: comm.all_reduce(torch.zeros(numel, dtype=dtype), op)


#: Kind -> the call of some ranks, that of another, and words of the error that all get.
DISAGREEMENTS = {
    "size": (all_reduce(3), all_reduce(4), ["of 3 float32", "of 4 float32"]),
    "operation": (all_reduce(3), all_reduce(3, op=_C.ReduceOp.MAX), ["(sum)", "(max)"]),
    "root": (
        lambda comm: comm.broadcast(torch.zeros(2), 0),
        lambda comm: comm.broadcast(torch.zeros(2), 1),
        ["from rank 0", "from rank 1"],
    ),
    "call": (
        all_reduce(3),
        lambda comm: comm.all_to_all(torch.zeros(3), torch.zeros(3)),
        ["all_reduce of 3", "all_to_all of 3"],
    ),
}
