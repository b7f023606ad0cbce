"""Heartbeats: who is silent, behind or ahead, and a store that does not answer."""

import asyncio
import collections
import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from bagua import _C
from support.processes.thread_names import threads
from support.threads.thread_ranks import run_threads

NOBODY = "No rank is silent, behind or ahead."


def boards(n):
    store = dist.HashStore()
    return [_C.FailureBoard(store, rank, n) for rank in range(n)]


def test_ranks_that_wait_in_the_same_round_are_not_mentioned():
    all_ranks = boards(3)
    for board in all_ranks:
        board.beat(7, "communicating", waits=True)
    time.sleep(0.2)
    assert [board.survey(7) for board in all_ranks] == [NOBODY] * 3
    assert all_ranks[0].survey(7, unit="call", everyone=True) == (
        "Where the others are: rank 1 is also in call 7: communicating; "
        "rank 2 is also in call 7: communicating."
    )


def test_a_rank_that_still_computes_is_named_where_no_other_is_to_blame():
    zero, one, two = boards(3)
    one.beat(7, "communicating", waits=True)
    two.beat(7, "computing, 3 of 8 tensors are ready")
    time.sleep(0.2)
    assert zero.survey(7) == (
        "Where the others are: rank 2 is still in round 7: computing, 3 of 8 tensors are ready."
    )
    del one
    assert zero.survey(7).startswith("Where the others are: rank 1 was killed")


def test_ranks_in_other_rounds_are_named_with_the_difference():
    zero, one, two = boards(3)
    one.beat(5, "computing, 1 of 4 tensors are ready")
    two.beat(8, "between two rounds")
    time.sleep(0.2)
    assert zero.survey(7) == (
        "Where the others are: rank 1 is 2 rounds behind, in round 5: computing, 1 of 4 tensors "
        "are ready; rank 2 is 1 round ahead, in round 8: between two rounds."
    )


def test_a_rank_that_beats_no_more_is_silent_and_one_that_never_did_is_unknown():
    zero, one, _ = boards(3)
    one.beat(7, "bucket 'a' is under way")
    time.sleep(0.2)
    del one
    assert zero.survey(7) == (
        "Where the others are: rank 1 was killed, stopped or cut off, or left by os._exit(): "
        "silent for over a second, last in round 7 (bucket 'a' is under way); "
        "rank 2 has sent no heartbeat."
    )


def test_a_rank_that_has_failed_and_left_is_not_the_silent_one():
    zero, one = boards(2)
    one.beat(7, "communicating")
    time.sleep(0.2)
    one.publish("connection closed", _C.Blame.MAYBE_OTHER)
    del one
    assert zero.survey(7) == "Where the others are: rank 1 has failed too, in round 7."
    assert zero.poll() == "rank 1: connection closed"


SERVER = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.fixture
def server():
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as process:
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_store_whose_host_is_gone_blocks_no_rank(server, how):
    process, port = server
    store = dist.TCPStore("127.0.0.1", port, 1, timeout=timedelta(seconds=30))
    board = _C.FailureBoard(store, 0, 2)
    board.beat(1, "computing")
    os.kill(process.pid, how)
    start = time.monotonic()
    assert "The job's store does not answer" in board.survey(1)
    assert board.poll() is None
    assert board.poll_exit(3) is None
    seen = "module 'm', rank 0 of 2, round 3: all_gather with peer 1 failed"
    verdict, here = board.diagnose(seen, 3).split("\n")
    assert verdict.startswith("The job's store does not answer")
    assert here == f"  Seen here: {seen}"
    board.publish("nobody hears this")
    board.publish_exit(1)
    del board
    assert time.monotonic() - start < 8.0


def test_a_wait_says_that_the_store_does_not_answer_though_nobody_can_be_asked(server):
    process, port = server
    reports = []
    store = dist.TCPStore("127.0.0.1", port, 1, timeout=timedelta(seconds=30))
    board = _C.Board(store, 0, 2, straggler_after_s=1.0, on_straggler=reports.append)
    seat = board.seat("wrap1", [0, 1], title="module 'Net'")
    seat.beat(1, "0 of 2 buckets are done", True, on_news=str, on_never=str)
    deadline = time.monotonic() + 20.0
    while not store.check(["beat/0", "news"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGSTOP)
    seat.beat(2, "1 of 2 buckets is done", True, on_news=str, on_never=str)
    deadline = time.monotonic() + 20.0
    while not reports and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "module 'Net', rank 0 of 2, round 2: waiting for other ranks, has waited" in reports[0]
    assert "The job's store does not answer: the process that has it" in reports[0]
    os.kill(process.pid, signal.SIGCONT)


class Counting(dist.Store):
    """Counts requests to the store behind it, which `hold` keeps from answering."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.requests = inner, collections.Counter()
        self.hold, self.broken, self.clones = threading.Event(), False, 0
        self.hold.set()

    def _pass(self, name, *args):
        self.hold.wait(20.0)
        if self.broken:
            raise dist.DistNetworkError("connection reset by peer")
        self.requests[name] += 1
        return getattr(self.inner, name)(*args)

    def clone(self):
        self.clones += 1
        self.broken = False
        return self

    def has_extended_api(self):
        return True

    set = functools.partialmethod(_pass, "set")
    get = functools.partialmethod(_pass, "get")
    add = functools.partialmethod(_pass, "add")
    check = functools.partialmethod(_pass, "check")
    compare_set = functools.partialmethod(_pass, "compare_set")
    delete_key = functools.partialmethod(_pass, "delete_key")
    multi_get = functools.partialmethod(_pass, "multi_get")
    append = functools.partialmethod(_pass, "append")


def threads_of_boards():
    """Their numbers: boards of other tests may end meanwhile."""
    return {number for number, name in threads().items() if name in ("bagua-beats", "bagua-asks")}


def test_a_group_has_one_board_whatever_seats_and_ranks_there_are():
    size, seats = 64, 8
    store = Counting(dist.HashStore())
    for rank in range(1, size):
        store.inner.set(f"beat/{rank}", f"{rank}\nwrap0 3 0 computing")
    before = threads_of_boards()
    board = _C.Board(store, 0, size)
    waiting = [board.seat(f"wrap{i}", list(range(size))) for i in range(seats)]
    for seat in waiting:
        seat.beat(3, "bucket 'a' is under way", True, on_news=str)
    time.sleep(0.3)
    store.requests.clear()
    time.sleep(2.0)
    # A heartbeat twice a second, a look at the count of the news less often.
    assert 3 <= store.requests["set"] <= 5
    assert 2 <= store.requests["add"] <= 4
    assert store.requests.total() <= 9
    assert len(threads_of_boards() - before) == 2
    assert store.clones <= 2
    keys = store.inner.num_keys()
    store.requests.clear()
    assert "rank 63 was killed" in waiting[0].survey(3)  # nobody beats here
    assert store.requests["multi_get"] == 2
    assert store.requests["check"] == 1  # whether all have ever beaten
    assert store.inner.num_keys() == keys == size + 1


def test_seats_come_and_go_without_leaving_keys():
    store = dist.HashStore()
    boards = [_C.Board(store, rank, 2) for rank in range(2)]
    keys = []
    for wrap in range(12):
        lanes = [board.seat(f"wrap{wrap}", [0, 1]) for board in boards]
        for lane in lanes:
            lane.beat(wrap, "computing")
        lanes[0].publish_exit(7)
        assert lanes[1].poll_exit(8) == "rank 0 exited after 7 rounds"
        lanes[1].publish_exit(8)
        time.sleep(0.01)
        keys.append(store.num_keys())
    assert keys[1:] == keys[:1] * 11 or set(keys[4:]) == {keys[-1]}


def test_failures_of_a_seat_that_counts_by_rounds_are_forgotten_with_the_round():
    store = dist.HashStore()
    zero, one = (
        _C.Board(store, rank, 2).seat("phase", [0, 1], per_round=True) for rank in range(2)
    )
    for phase in (1, 2):
        for seat in (zero, one):
            seat.beat(phase, f"call {phase}", waits=True)
        assert zero.poll() is None
        one.publish(f"out of paper in {phase}", _C.Blame.MAYBE_OTHER)
        assert zero.poll() == f"rank 1: out of paper in {phase}"
        assert "rank 1 has failed too" in zero.survey(phase, "", everyone=True)
    assert store.num_keys() == 4  # two heartbeats, the count of news, the last failure


def until(condition):
    deadline = time.monotonic() + 20.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_the_last_rank_to_leave_takes_the_keys_of_the_group_with_it():
    store = dist.HashStore()
    boards = [_C.Board(store, rank, 3) for rank in range(3)]
    seats = [board.seat("wrap1", [0, 1, 2]) for board in boards]
    for seat in seats:
        seat.beat(3, "between two rounds")
    until(lambda: store.check([f"beat/{rank}" for rank in range(3)]))
    for board, seat in zip(boards, seats, strict=True):
        assert store.check([f"beat/{rank}" for rank in range(3)])
        seat.publish_exit(3)
        board.leave()
        board.leave()  # counts once
    until(lambda: not store.num_keys())


def test_a_process_that_ends_deletes_nothing_in_a_store_that_may_end_with_it():
    store = Counting(dist.HashStore())
    boards = [_C.Board(store, rank, 2) for rank in range(2)]
    for board in boards:
        board.seat("wrap1", [0, 1]).beat(3, "between two rounds")
        board.leave(process_ends=True)
    until(lambda: all(b"exited" in store.inner.get(f"beat/{rank}") for rank in range(2)))
    assert not store.requests["delete_key"]


MANY, DEAD = 80, 79
LOST = (
    f"rank {DEAD} was killed, stopped or cut off, or left by os._exit(): silent for over a second, "
    "last in round 5 (waiting)"
)


def many_waiting():
    """Seats of three of many ranks, of which the last one is dead, and the others have exited."""
    store = Counting(dist.HashStore())
    store.inner.set(f"beat/{DEAD}", "12\nwrap1 5 1 waiting")
    for rank in range(3, DEAD):
        store.inner.set(f"beat/{rank}", "7\nexited")
    seats = [_C.Board(store, rank, MANY).seat("wrap1", list(range(MANY))) for rank in range(3)]
    for seat in seats:
        seat.beat(5, "waiting", waits=True)
    until(lambda: store.inner.check([f"beat/{rank}" for rank in range(MANY)]))
    asked, multi_get = [], store.multi_get
    store.multi_get = lambda keys: asked.append(len(keys)) or multi_get(keys)
    return store, seats, asked


def test_one_of_many_ranks_looks_for_a_lost_one_and_the_others_take_its_verdict():
    store, seats, asked = many_waiting()
    assert LOST in seats[0].survey(5)
    assert store.inner.get("silent") == f"= {DEAD} 12".encode()
    assert asked == [MANY, MANY]
    assert seats[1].survey(5) == f"Where the others are: {LOST}."
    assert asked == [MANY, MANY, 1], "the heartbeat that is named"


def test_a_rank_waits_for_the_verdict_of_the_one_that_looks():
    store, seats, _ = many_waiting()
    store.inner.set("silent", "?0")
    seen = []
    survey = threading.Thread(target=lambda: seen.append(seats[1].survey(5)))
    survey.start()
    until(lambda: store.requests["compare_set"] > 0)
    store.inner.set("silent", f"= {DEAD} 12")
    survey.join()
    assert LOST in seen[0]


def test_a_verdict_is_not_taken_of_a_rank_that_beats_nor_waited_for_without_an_end():
    store, seats, asked = many_waiting()
    # Old, of one that has exited, of this rank, of none, of no form.
    store.inner.set("silent", f"= {DEAD} 11 4 7 0 1 99 1 -1 x")
    assert LOST in seats[0].survey(5)
    assert asked[-2:] == [MANY, MANY]
    store.inner.set("silent", "?7")  # which was killed as it looked
    assert LOST in seats[0].survey(5)
    assert store.inner.get("silent") == f"= {DEAD} 12".encode()


def test_ranks_look_again_where_the_one_that_looked_found_nobody_silent():
    store, seats, asked = many_waiting()
    store.inner.set("silent", "=")
    assert LOST in seats[2].survey(5)
    assert asked == [MANY, MANY]
    assert store.inner.get("silent") == f"= {DEAD} 12".encode()


def group_of_two(store, reports, after=0.1):
    """A seat of a lane and one of calls, of both ranks of a group."""
    result = []
    for rank in range(2):
        board = _C.Board(store, rank, 2, straggler_after_s=after, on_straggler=reports.append)
        lane = board.seat("wrap1", [0, 1], title="module 'Net'")
        calls = board.seat("eager/global", [0, 1], title="communicator 'global'", unit="call")
        result.append((lane, calls))
    return result


def test_a_wait_tells_in_which_other_call_the_missing_rank_is():
    reports = []
    (lane, calls), (other_lane, _) = group_of_two(dist.HashStore(), reports)
    lane.beat(2, "between two rounds")
    other_lane.beat(3, "0 of 2 buckets are done", waits=True)
    calls.beat(1, "broadcast in save_checkpoint", True, on_never=reports.append)
    deadline = time.monotonic() + 10.0
    while len(reports) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    warning, reason = reports[:2]
    there = "round 3 of module 'Net': 0 of 2 buckets are done"
    assert (
        "communicator 'global', rank 0 of 2, call 1: waiting for other ranks, has wait" in warning
    )
    assert "(broadcast in save_checkpoint)" in warning
    assert f"rank 1 has not come to this call: it waits in {there}" in warning
    assert reason == (
        f"rank 1 does not make this call: it waits in {there}, which this rank has not begun, so "
        "that each waits for the other"
    )


def test_a_wait_that_goes_on_to_another_message_is_not_a_long_one():
    reports = []
    (_, calls), _ = group_of_two(dist.HashStore(), reports, after=0.8)
    deadline, number = time.monotonic() + 3.0, 0
    while time.monotonic() < deadline:
        number += 1
        calls.beat(1, f"gathering the weights of '{number}'", True, on_never=reports.append)
        time.sleep(0.2)
    assert reports == []


def test_a_wait_of_another_thread_is_not_taken_for_one_that_never_ends():
    reports, never = [], []
    (lane, calls), (other_lane, _) = group_of_two(dist.HashStore(), reports)
    run_threads(1, lambda _: lane.beat(2, "between two rounds"))
    other_lane.beat(3, "0 of 2 buckets are done", waits=True)
    calls.beat(1, "broadcast", True, on_never=never.append)
    deadline = time.monotonic() + 10.0
    while len(reports) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(reports) >= 2
    assert never == []


def test_a_long_heartbeat_is_cut_and_nobody_called_absent_is_blamed():
    store = dist.HashStore()
    zero, one = (_C.Board(store, rank, 2) for rank in range(2))
    seats = [one.seat(f"wrap{i}", [0, 1], title="module 'Net'") for i in range(60)]
    for seat in seats:
        seat.beat(1, "computing " + 300 * "x")
    time.sleep(0.7)
    assert len(store.get("beat/1")) <= 2048
    assert "as far as it can be seen" in zero.seat("wrap59", [0, 1]).survey(1) or (
        "rank 1 has not come to this round: it is in round 1 of module 'Net'"
        in zero.seat("wrap59", [0, 1]).survey(1)
    )


def test_a_store_that_was_slow_is_asked_again_and_heartbeats_go_on():
    inner = dist.HashStore()
    store = Counting(inner)
    mine, other = _C.FailureBoard(store, 0, 2), _C.FailureBoard(inner, 1, 2)
    mine.beat(5, "waiting", waits=True)
    other.beat(5, "waiting", waits=True)
    time.sleep(0.3)
    store.hold.clear()
    assert mine.survey(5).startswith("The job's store does not answer")
    start = time.monotonic()
    assert mine.survey(5).startswith("The job's store does not answer")
    assert time.monotonic() - start < 1.0  # nobody waits for what is late already
    silent = inner.get("beat/0")
    store.hold.set()
    time.sleep(1.0)
    assert inner.get("beat/0") != silent
    assert mine.survey(5) == other.survey(5) == NOBODY


def test_a_connection_that_broke_is_made_anew():
    store = Counting(dist.HashStore())
    board = _C.FailureBoard(store, 0, 2)
    board.beat(5, "waiting", waits=True)
    time.sleep(0.2)
    before, clones = store.inner.get("beat/0"), store.clones
    store.broken = True
    time.sleep(1.2)
    assert store.clones > clones
    assert store.inner.get("beat/0") != before
    assert board.survey(5) == "Where the others are: rank 1 has sent no heartbeat."


def link_of(port, rtt):
    """A port at which the store is `rtt` seconds away, and what ends that."""
    loop = asyncio.new_event_loop()

    async def pump(reader, writer):
        while data := await reader.read(65536):
            loop.call_later(rtt / 2, writer.write, data)

    async def client(reader, writer):
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    started = loop.run_until_complete(asyncio.start_server(client, "127.0.0.1", 0))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return started.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(loop.stop)


def test_a_killed_rank_of_64_is_named_rightly_by_one_200_ms_away():
    near = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size, over = 64, threading.Event()

    def live():
        for number in itertools.count():
            for rank in range(1, size - 1):
                near.set(f"beat/{rank}", f"{number} 5 1 waiting")
            if over.wait(0.3):
                return

    near.set(f"beat/{size - 1}", "9 5 0 computing")
    alive = threading.Thread(target=live)
    alive.start()
    port, end = link_of(near.port, 0.2)
    try:
        board = _C.FailureBoard(dist.TCPStore("127.0.0.1", port, is_master=False), 0, size)
        board.beat(5, "waiting", waits=True)
        time.sleep(1.0)
        seen = board.survey(5)
    finally:
        over.set()
        alive.join()
        del board
        end()
    assert seen == (
        "Where the others are: rank 63 was killed, stopped or cut off, or left by os._exit(): "
        "silent for over a second, last in round 5 (computing)."
    )
