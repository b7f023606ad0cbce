"""Shared memory between ranks that are threads: conformance, bits, disagreements, refusals."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from support.threads import communicator_conformance as conformance
from support.threads.communicator_conformance import all_reduce
from support.threads.shared_ranks import errors_of_shared_ranks, run_shared_ranks, share
from support.threads.thread_ranks import run_thread_ranks, run_threads

RANKS = [2, 3, 5, 8]
OPS = [_C.ReduceOp.SUM, _C.ReduceOp.AVG, _C.ReduceOp.MIN, _C.ReduceOp.MAX]
# Sizes at which each rank joins all bytes, of one piece, and of several pieces.
ELEMENTS = [1, 31, 4099, 3 * (1 << 17) + 4099]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("n", RANKS, ids=lambda n: f"{n}-ranks")
def test_ranks_conform(n):
    assert run_shared_ranks(n, conformance.run_all) == [(rank, n) for rank in range(n)]


def reduced(comm, stack):
    results = []
    for op in OPS:
        if op == _C.ReduceOp.AVG and not stack.dtype.is_floating_point:
            continue
        results.append(stack[comm.rank].clone())
        comm.all_reduce(results[-1], op)
    return torch.stack(results)


def values(n, numel, dtype):
    generator = torch.Generator().manual_seed(numel)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        low, high = max(limits.min, -(2**62)), min(limits.max, 2**62)
        return torch.randint(low, high, (n, numel), generator=generator, dtype=dtype)
    stack = (torch.randn(n, numel, generator=generator) * 30).to(dtype)
    stack[0, :: 7 * n] = torch.inf
    stack[-1, 3 :: 7 * n] = torch.nan
    return stack


@pytest.mark.parametrize("numel", ELEMENTS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("n", [2, 3, 7], ids=lambda n: f"{n}-ranks")
def test_reductions_have_the_bits_of_values_joined_in_rank_order(n, dtype, numel):
    """Those of ThreadCommunicator, whose additions are torch's."""
    stack = values(n, numel, dtype)
    expected = run_thread_ranks(n, reduced, stack)[0]
    results = run_shared_ranks(n, reduced, stack)
    torch.testing.assert_close(results[0], expected, rtol=0, atol=0, equal_nan=True)
    for other in results[1:]:
        assert torch.equal(other.view(torch.uint8), results[0].view(torch.uint8))


def test_sums_of_complex_numbers_are_those_of_their_parts():
    stack = torch.randn(3, 20000, dtype=torch.complex64)

    def run(comm):
        mine = stack[comm.rank].clone()
        comm.all_reduce(mine, _C.ReduceOp.SUM)
        return mine

    for total in run_shared_ranks(3, run):
        assert torch.equal(total, stack[0] + stack[1] + stack[2])


def test_messages_larger_than_the_ring_pass_both_ways_at_once():
    numel = 5 * (1 << 18) + 13  # 5 MiB in rings of one

    def run(comm):
        sent = torch.arange(numel, dtype=torch.int32) * (comm.rank + 1)
        received = [torch.zeros(numel, dtype=torch.int32) for _ in range(2)]
        arrived = []
        other = 1 - comm.rank
        comm.exchange([(sent, other), (sent + 1, other)], [(r, other) for r in received])
        arrived += [
            torch.equal(r, sent // (comm.rank + 1) * (other + 1) + i)
            for i, r in enumerate(received)
        ]
        return arrived

    assert run_shared_ranks(2, run) == [[True, True]] * 2


DISAGREEMENTS = conformance.DISAGREEMENTS | {
    "much size": (all_reduce(3), all_reduce(2**20), ["of 3 float32", "of 1048576 float32"]),
    "dtype": (all_reduce(3), all_reduce(3, torch.int32), ["3 float32", "3 int32"]),
}


@pytest.mark.parametrize(
    ("first", "second", "words"), DISAGREEMENTS.values(), ids=list(DISAGREEMENTS)
)
def test_ranks_that_disagree_all_raise_naming_both(first, second, words):
    errors = errors_of_shared_ranks([first, second, first])
    assert [type(error) for error in errors] == [_C.BaguaMismatchError] * 3
    for error in errors:
        assert all(word in str(error) for word in [*words, "rank 1"]), error


def test_an_exchanged_size_that_disagrees_raises_where_it_is_received():
    errors = errors_of_shared_ranks(
        [
            lambda comm: comm.exchange([(torch.zeros(5), 1)], []),
            lambda comm: comm.exchange([], [(torch.zeros(6), 0)]),
        ]
    )
    assert errors[0] is None  # its message fitted into the memory
    assert isinstance(errors[1], _C.BaguaMismatchError)
    assert "rank 0 sends 20 bytes float32 to rank 1, which expects 24 bytes" in str(errors[1])


@pytest.mark.parametrize(
    "call",
    [
        all_reduce(3),
        all_reduce(2**20),
        lambda comm: comm.all_gather(torch.zeros(3), torch.zeros(9)),
        lambda comm: comm.all_to_all(torch.zeros(3), torch.zeros(3)),
        lambda comm: comm.broadcast(torch.zeros(3), 2),
        lambda comm: comm.exchange([], [(torch.zeros(3), 2)]),
    ],
    ids=["all_reduce", "large all_reduce", "all_gather", "all_to_all", "broadcast", "exchange"],
)
def test_a_rank_that_does_not_come_is_a_timeout_that_names_it(call):
    begin = time.monotonic()
    errors = errors_of_shared_ranks([call, call, lambda comm: time.sleep(1.5)], timeout=0.4)
    assert time.monotonic() - begin < 5.0
    assert errors[2] is None
    late = [error for error in errors if isinstance(error, _C.BaguaTimeoutError)]
    assert late, errors
    assert all("with peer 2 failed: Timed out waiting 400ms" in str(error) for error in late)


def test_an_abort_ends_a_call_here_and_there_and_refuses_later_ones():
    texts = []

    def be_aborted(comm):
        threading.Timer(0.2, comm.abort, ["the user pressed a key"]).start()
        try:
            comm.all_reduce(torch.zeros(1), _C.ReduceOp.SUM)
        except _C.BaguaError as error:
            texts.append(str(error))
        comm.all_gather(torch.zeros(1), torch.zeros(3))

    begin = time.monotonic()
    errors = errors_of_shared_ranks([be_aborted, all_reduce(1), lambda comm: time.sleep(1.0)])
    assert time.monotonic() - begin < 4.0
    assert "all_reduce of 4 bytes float32 failed: aborted: the user pressed a key" in texts[0]
    assert "all_gather refused: aborted: the user pressed a key" in str(errors[0])
    assert "with peer 0 failed: the peer gave up a call" in str(errors[1])


def test_a_rank_that_has_left_is_named_at_once():
    first, second = (communicator for communicator, _ in share(2))
    del second
    begin = time.monotonic()
    with pytest.raises(_C.BaguaError, match="with peer 1 failed: the peer has left the group"):
        first.all_reduce(torch.zeros(1), _C.ReduceOp.SUM)
    with pytest.raises(_C.BaguaError, match="refused: an earlier call failed"):
        first.all_reduce(torch.zeros(1), _C.ReduceOp.SUM)
    assert time.monotonic() - begin < 1.0


def test_what_a_rank_has_sent_arrives_after_it_has_left():
    first, second = (communicator for communicator, _ in share(2))
    second.exchange([(torch.arange(1000.0), 0)], [])
    del second
    received = torch.zeros(1000)
    first.exchange([], [(received, 1)])
    assert torch.equal(received, torch.arange(1000.0))


def test_dtypes_without_a_reduction_are_refused_by_name():
    comm = share(2)[0][0]
    with pytest.raises(_C.BaguaError, match=r"no sum of uint32, convert"):
        comm.all_reduce(torch.zeros(2).to(torch.uint32), _C.ReduceOp.SUM)
    with pytest.raises(_C.BaguaError, match=r"no max of complex64"):
        comm.all_reduce(torch.zeros(2, dtype=torch.complex64), _C.ReduceOp.MAX)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"nodes": [0, 0, 4]}, "ranks 0 and 2 are on nodes 0 and 4"),
        ({"refusals": ["", "BAGUA_COMM=gloo", ""]}, "rank 1: BAGUA_COMM=gloo"),
    ],
)
def test_ranks_that_cannot_share_memory_all_say_the_same_reason(arguments, reason):
    assert share(3, **arguments) == [(None, reason)] * 3


def test_a_rank_that_does_not_come_to_share_memory_is_a_timeout():
    with pytest.raises(_C.BaguaTimeoutError, match=r"(?i)time"):
        _C.Gathering(dist.HashStore(), "offer", 0, 2, 0.3).share_memory(node=0)


class Meddling(dist.Store):
    """Keys as rank 1 would have written them, had it been somewhere else."""

    def __init__(self, store, change):
        super().__init__()
        self.inner, self.change = store, change

    def append(self, key, value):
        place, text = value.decode().split("\n")
        changed = self.change(key, text)
        self.inner.append(key, f"{place.split()[0]} {len(changed)}\n{changed}")

    def has_extended_api(self):
        return True

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        return self.inner.get(key)

    def add(self, key, value):
        return self.inner.add(key, value)

    def compare_set(self, key, expected, desired):
        return self.inner.compare_set(key, expected.decode(), desired.decode())

    def check(self, keys):
        return self.inner.check(keys)

    def wait(self, keys, timeout=None):
        self.inner.wait(keys, timeout)


def shared_where_rank_one_says(change, timeout=10.0):
    store = dist.HashStore()
    results = [None, None]

    def meet(rank):
        own = Meddling(store, change) if rank == 1 else store
        results[rank] = _C.Gathering(own, "offer", rank, 2, timeout).share_memory(node=0)[:2]

    run_threads(2, meet)
    (first, why), (second, why_too) = results
    assert first is second is None
    assert why == why_too
    return why


def replaced(position, text):
    """A change of one word of rank 1's offer."""

    def change(key, value):
        if "offer" not in key:
            return value
        words = value.split()
        words[position] = text
        return " ".join(words)

    return change


@pytest.mark.parametrize(
    ("position", "text", "reason"),
    [
        (1, "0000", "ranks 0 and 1 run under different kernels"),
        (2, "net:[1]", "ranks 0 and 1 are in different network namespaces"),
        (3, "7", "ranks 0 and 1 are on nodes 0 and 7"),
        (0, "9", "rank 1 has put something else into the store"),
    ],
    ids=["boot", "network", "node", "version"],
)
def test_ranks_in_other_places_share_nothing(position, text, reason):
    assert shared_where_rank_one_says(replaced(position, text)).startswith(reason)


@pytest.mark.parametrize(
    ("position", "text"), [(4, "1"), (6, "12345")], ids=["another process", "another memory"]
)
def test_a_rank_that_is_not_who_it_says_is_not_let_in(position, text):
    begin = time.monotonic()
    why = shared_where_rank_one_says(replaced(position, text), timeout=2.0)
    assert "rank" in why
    assert time.monotonic() - begin < 6.0


def open_files():
    return len(os.listdir("/proc/self/fd"))


def mapped_memory():
    return Path("/proc/self/maps").read_text().count("memfd:bagua")


def test_dropped_communicators_leave_no_file_and_no_mapping():
    share(3)
    files, mappings = open_files(), mapped_memory()
    for _ in range(5):
        share(3)
    assert open_files() == files
    assert mapped_memory() == mappings
    assert not [name for name in os.listdir("/dev/shm") if "bagua" in name]
