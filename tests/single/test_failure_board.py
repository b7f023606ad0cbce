"""Heartbeats: who is silent, behind or ahead, and a store that does not answer."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from bagua import _C

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
        "Where the others are: rank 1 was killed, stopped or cut off: silent for over a second, "
        "last in round 7 (bucket 'a' is under way); rank 2 has sent no heartbeat."
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
