"""C10dCommunicator on gloo: conformance, and failures that name the peer and end in time.

CUDA tensors go over gloo, too, as BAGUA_COMM=gloo has it.
"""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from bagua import _C
from bagua._core.group.connections import Connections
from ranks.test_shared_memory import LATE_SECONDS, default_group, error_of
from support import training
from support.cases import over
from support.processes.thread_names import thread_names
from support.threads import communicator_conformance as conformance

GLOO = {"BAGUA_COMM": "gloo"}


def own_group(timeout):
    """A group with a timeout (seconds) of its own, as lanes have."""
    store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    return _C.C10dCommunicator(dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout)))


def exchange_with(comm, peer, numel):
    comm.exchange([(torch.zeros(numel), peer)], [(torch.zeros(numel), peer)])


def conform():
    comm = default_group()
    conformance.run_all(comm)
    return comm.rank, comm.size


@over(n=[1, 2, 3])
def test_gloo_ranks_conform(ranks, n):
    assert ranks(n, conform, timeout=100) == [(rank, n) for rank in range(n)]


def connected(device_type, name="test"):
    """As a lane connects for tensors of that type, for which CPU tensors stand in."""
    store = dist.distributed_c10d._get_default_store()
    members = list(range(dist.get_world_size()))
    keys = dist.PrefixStore(name, store)
    connections = Connections(keys, dist.get_rank(), members, training.TIMEOUT)
    return connections.connect(name, device_type)


def loops_of_connections():
    made = [connected("cpu"), connected("cpu", "again")]
    return len(made), thread_names().count("gloo_tcp_loop")


def test_connections_share_the_thread_that_wakes_a_hundred_times_a_second(ranks):
    assert ranks(2, loops_of_connections, env=GLOO, fresh=True) == [(2, 1)] * 2


def count_bytes(device_type):
    comm = connected(device_type)
    tensor = torch.ones(300)
    comm.all_reduce(tensor, _C.ReduceOp.SUM)
    exchange_with(comm, 1 - comm.rank, 300)
    return comm.traffic()["bytes_sent"], tensor[0].item()


def test_host_memory_is_counted_as_the_tensor_it_carries(ranks):
    on_cpu = ranks(2, count_bytes, "cpu")
    assert ranks(2, count_bytes, "cuda", env=GLOO) == on_cpu == [(2400, 2)] * 2


def be_late_on_rank_one():
    comm = own_group(LATE_SECONDS)
    exchange_with(comm, 1 - comm.rank, 4)
    errors = []
    if comm.rank == 0:
        errors = [
            error_of(lambda: exchange_with(comm, 1, 1024)),
            error_of(lambda: exchange_with(comm, 1, 1024)),
        ]
    dist.barrier()  # on the default group: rank 1 is late, not gone
    return errors


def test_a_late_peer_is_a_timeout_that_names_it_and_ends_the_communicator(ranks):
    first, second = ranks(2, be_late_on_rank_one)[0]
    assert first[0] == "BaguaTimeoutError"
    assert "rank 0 of 2: exchange of 4096 bytes float32 with peer 1 failed: " in first[1]
    assert first[2] < 10 * LATE_SECONDS
    assert second[0] == "BaguaError"
    assert "exchange refused: an earlier call failed (rank 0 of 2: exchange of 4096" in second[1]
    assert second[2] < LATE_SECONDS / 2


def abort_while_a_call_is_blocked():
    comm = own_group(LATE_SECONDS)
    if comm.rank == 1:
        dist.barrier()  # alive, but not in the call
        return None
    timer = threading.Timer(LATE_SECONDS / 4, comm.abort, ["the user pressed a key"])
    timer.start()
    blocked = error_of(lambda: comm.broadcast(torch.zeros(1), 1))
    timer.join()
    later = error_of(lambda: comm.all_gather(torch.zeros(1), torch.zeros(2)))
    dist.barrier()
    return blocked, later


def test_abort_refuses_later_calls_with_its_reason(ranks):
    blocked, later = ranks(2, abort_while_a_call_is_blocked)[0]
    assert blocked[0] == "BaguaTimeoutError"  # gloo ends no call before the group's timeout
    assert "broadcast of 4 bytes float32 with peer 1 failed" in blocked[1]
    assert later[0] == "BaguaError"
    assert "all_gather refused: aborted: the user pressed a key" in later[1]


def average_on_a_backend_that_only_adds():
    fake = torch._C._distributed_c10d.FakeProcessGroup._create_internal(0, 2)
    comm = _C.C10dCommunicator(fake)
    tensor = torch.full((3,), 4.0)
    comm.all_reduce(tensor, _C.ReduceOp.AVG)
    comm.all_gather(tensor, torch.zeros(6))
    comm.all_to_all(torch.zeros(4), torch.zeros(4))
    comm.broadcast(tensor, 1)
    comm.exchange([(tensor, 1)], [(torch.zeros(3), 1)])
    return comm.size, tensor.tolist()


def test_other_backends_get_their_own_calls_and_divided_values(ranks):
    assert ranks(1, average_on_a_backend_that_only_adds) == [(2, [2.0, 2.0, 2.0])]


def drop_right_after_sending(times):
    """What is sent is memory of Python's, and gloo's thread may be the last to hold it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for number in range(times):
        store = dist.PrefixStore(f"{number}", dist.distributed_c10d._get_default_store())
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))
        comm = _C.C10dCommunicator(backend)
        del backend
        payload = torch.frombuffer(bytearray(8), dtype=torch.uint8)
        comm.broadcast(payload, 0)
        del payload
        del comm
    return times


def test_a_communicator_may_be_dropped_right_after_it_sent_memory_of_python(ranks):
    assert ranks(2, drop_right_after_sending, 25) == [25, 25]


def send_to_a_rank_that_expects():
    comm, received = connected("cpu"), torch.zeros(3)
    if comm.rank == 0:
        comm.expect([(received, 1)])
    dist.barrier()
    if comm.rank == 1:
        comm.exchange([(torch.ones(3), 0)], [])
    dist.barrier()
    if comm.rank == 0:
        comm.exchange([], [(received, 1)])
    return received.sum().item()


def test_a_message_that_is_expected_does_not_wait_for_the_call(ranks):
    assert ranks(2, send_to_a_rank_that_expects, env=GLOO) == [3, 0]


def gather_records_among_other_calls():
    comm = connected("cpu")
    comm.shorten_paths()
    ranks, wrong = torch.arange(comm.size), []
    for turn in range(4):
        for numel in (7, 3, 7):
            records = torch.full((comm.size * numel,), -1)
            comm.all_gather(torch.full((numel,), 10 * turn + comm.rank), records)
            if not torch.equal(records, (10 * turn + ranks).repeat_interleave(numel)):
                wrong.append((turn, numel, records))
            total = torch.full((5,), comm.rank)
            comm.all_reduce(total, _C.ReduceOp.SUM)
            exchange_with(comm, (comm.rank + 1) % comm.size if comm.size == 2 else comm.rank, 4)
            if total.tolist() != 5 * [sum(range(comm.size))]:
                wrong.append((turn, numel, total))
    return wrong


@over(n=[2, 3])
def test_records_that_are_awaited_arrive_whatever_is_called_between(ranks, n):
    assert ranks(n, gather_records_among_other_calls, env=GLOO) == [[]] * n


def broadcasts_in_parts(shortened, numels):
    """Sizes and roots whose broadcasts are wrong, and the traffic of a large one by root 0."""
    comm, wrong = connected("cpu"), []
    if shortened:
        comm.shorten_paths()
    for numel in numels:
        expected = torch.arange(numel).float() + 0.5
        for root in range(comm.size):
            tensor = expected.clone() if comm.rank == root else torch.full((numel,), -1.0)
            before = comm.traffic()
            comm.broadcast(tensor, root)
            if not torch.equal(tensor, expected):
                wrong.append((numel, root))
            if root == 0:
                sent = {key: comm.traffic()[key] - before[key] for key in before}
    return wrong, sent["messages_sent"], sent["bytes_sent"], sent["bytes_received"]


#: Parts that are empty, that are one piece, and that are many of 64 KiB and of more.
PARTS = [1, 2, 5, 1000, 100_003, 3_000_001]


@over(n=[1, 2, 3, 4])
def test_broadcasts_in_parts_send_from_the_root_once(ranks, n):
    """Broadcasts over shortened paths, and large ones among few ranks."""
    size = 4 * PARTS[-1]
    for shortened, numels in ((True, PARTS), (False, PARTS[-2:])):
        root, *others = ranks(n, broadcasts_in_parts, shortened, numels, env=GLOO)
        assert root == ([], n - 1, size if others else 0, 0)
        for other in others:
            assert other == ([], n - 2, (n - 2) * size // (n - 1), size)


#: Sizes that parts of gloo's ring, and its segments of 1 MiB, do and do not divide.
NUMELS = [1, 2, 3, 7, 4099, 262144, 700_001, 2_100_000]


def sums_by_both_ways():
    """Where gloo's sums and those of shortened paths have other bits."""
    ring, direct = connected("cpu"), connected("cpu", "again")
    direct.shorten_paths()
    generator = torch.Generator().manual_seed(dist.get_rank())
    different = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
        for numel in NUMELS:
            values = 1000 * torch.randn(numel, generator=generator, dtype=torch.float64)
            for op in (_C.ReduceOp.SUM, _C.ReduceOp.AVG, _C.ReduceOp.MIN, _C.ReduceOp.MAX):
                if op == _C.ReduceOp.AVG and not dtype.is_floating_point:
                    continue
                expected, result = values.to(dtype), values.to(dtype)
                ring.all_reduce(expected, op)
                direct.all_reduce(result, op)
                if not torch.equal(expected, result):
                    different.append((dtype, numel, op))
    return different, ring.traffic()["bytes_sent"] - direct.traffic()["bytes_sent"]


@over(n=[2, 3, 4])
def test_sums_over_shortened_paths_have_the_bits_of_the_ring_of_gloo(ranks, n):
    assert ranks(n, sums_by_both_ways, env=GLOO) == [([], 0)] * n
