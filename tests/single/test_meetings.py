"""What ranks ask the store for when they meet; ranks are threads."""

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bagua import _C, BaguaError, BaguaTimeoutError
from bagua._core.group.connections import MOVED, Connections, by_doubling
from support.counting_store import CountingStore
from support.threads.thread_ranks import run_threads

TIMEOUT = timedelta(seconds=60)


def meet(size, act):
    """Counting stores by rank, after `act(connections)` on all ranks; each is a node."""
    inner = dist.HashStore()
    stores = [CountingStore(inner) for _ in range(size)]

    everyone = {}

    def run(rank):
        connections = Connections(stores[rank], rank, list(range(size)), TIMEOUT, node=rank)
        everyone[rank] = connections
        act(connections)

    run_threads(size, run)
    everyone[0].forget_left()
    assert inner.num_keys() == 0, inner.list_keys()
    return stores


def test_a_meeting_asks_the_store_for_as_much_with_many_ranks_as_with_two():
    def act(connections):
        everyone = list(range(connections.size))
        assert connections.node_of_ranks() == everyone
        texts = connections._gather("words", everyone, f"from {connections.rank}\n")
        assert texts == [f"from {rank}\n".encode() for rank in everyone]

    for size in (2, 8, 64):
        for store in meet(size, act):
            # The rank that completes a meeting sets a key, the last one that reads deletes three.
            assert store.requests.total() <= 2 * (5 + 3), store.requests
            assert store.longest < 100, "keys that list ranks"


def test_a_rank_that_waits_long_asks_instead_of_waits_that_time_out():
    """Torch warns of each of those, in two lines."""
    inner = dist.HashStore()
    stores = [CountingStore(inner) for _ in range(2)]
    asked = threading.Event()

    def check(keys, ask=stores[0].check):
        if stores[0].requests["check"] > 2:
            asked.set()
        return ask(keys)

    stores[0].check = check

    def run(rank):
        connections = Connections(stores[rank], rank, [0, 1], TIMEOUT, node=rank)
        assert rank == 0 or asked.wait(60.0)
        assert connections._gather("words", [0, 1], str(rank)) == [b"0", b"1"]

    run_threads(2, run)
    assert stores[0].requests["wait"] == 1


def test_connections_of_gloo_ask_for_no_key_of_each_rank():
    def act(connections):
        ones = torch.ones(1)
        connections.connect("lane", "cpu").all_reduce(ones, _C.ReduceOp.SUM)
        assert ones.item() == connections.size

    for size in (2, 8):
        for store in meet(size, act):
            assert store.requests.total() <= 2 * (5 + 3), store.requests


def test_small_messages_reach_many_ranks_over_few_connections():
    def act(connections):
        rank, size = connections.rank, connections.size
        few = connections.connect("few", "cpu", peers=by_doubling)
        connected.wait()
        if rank == 0:
            opened.append(len(os.listdir("/proc/self/fd")))
        connected.wait()
        total = torch.full((100,), float(rank))
        few.all_reduce(total, _C.ReduceOp.SUM)
        assert total.tolist() == [size * (size - 1) / 2] * 100
        for root in (0, 3, size - 1):
            value = torch.full((50,), float(rank))
            few.broadcast(value, root)
            assert value.tolist() == [float(root)] * 50
        for numel in (1, 7):
            records, before = torch.zeros(size * numel, dtype=torch.int64), few.traffic()
            few.all_gather(torch.arange(numel) + 1000 * rank, records)
            moved = {name: few.traffic()[name] - before[name] for name in MOVED}
            assert moved["messages_sent"] == moved["messages_received"] == 4, "1, 2, 4, 8 ranks on"
            assert moved["bytes_sent"] == moved["bytes_received"] == 8 * numel * (size - 1)
            every = [1000 * other + one for other in range(size) for one in range(numel)]
            assert records.tolist() == every
        connected.wait()
        if rank == 0:
            opened.append(len(os.listdir("/proc/self/fd")))
        connected.wait()

    of_a_transport = 4  # it listens, and polls
    for size in (9, 12, 16):
        connected, opened = threading.Barrier(size, timeout=60), [len(os.listdir("/proc/self/fd"))]
        meet(size, act)
        before, after_connecting, after_messages = opened
        pairs = sum(len(by_doubling(rank, size)) for rank in range(size))
        assert after_connecting == after_messages
        assert after_connecting - before <= pairs + size * of_a_transport


def test_missing_ranks_are_named_and_may_come_to_the_next_try():
    store = dist.HashStore()
    first = _C.Gathering(store, "words", 0, 3, 0.2)
    first.bring("early")
    with pytest.raises(BaguaTimeoutError, match=r"ranks 1, 2 did not come within .* 0\.2 s"):
        first.texts()
    results = [None] * 3

    def again(rank):
        meeting = _C.Gathering(store, "words", rank, 3, 20.0, counted=rank == 0)
        meeting.bring(f"rank {rank}")
        results[rank] = meeting.texts()

    run_threads(3, again)
    assert results == [[b"rank 0", b"rank 1", b"rank 2"]] * 3
    assert store.num_keys() == 0


def test_a_meeting_that_nobody_wants_any_more_ends():
    meeting = _C.Gathering(dist.HashStore(), "words", 0, 2, 60.0)
    meeting.bring("")
    meeting.give_up("rank 1 has exited")
    with pytest.raises(BaguaError, match="rank 1 has exited"):
        meeting.texts()


def test_what_strangers_write_into_a_meeting_is_refused_with_its_key():
    words = "7 0\n", "x 1\na", "1 99\na", "1", "-1 0\n", "\x1b[2J" * 99, "1 1\n\n1 9999999999\n"
    for text in words:
        store = dist.HashStore()
        store.set("words", text)
        for rank in (0, 1):
            _C.Gathering(store, "words", rank, 2, 20.0).bring("")
        meeting = _C.Gathering(store, "words", 0, 2, 20.0, counted=True)
        meeting.bring("")
        with pytest.raises(BaguaError, match="under 'words', which is not of the form") as raised:
            meeting.texts()
        assert str(raised.value).isprintable()
    store.set("more/count", "77")
    with pytest.raises(BaguaError, match=r"the store has '78' .* under 'more/count'"):
        _C.Gathering(store, "more", 0, 2, 20.0).bring("")
