"""Ranks as threads: conformance, bits, disagreements, timeouts, abort; the counter; the board."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from support.cases import over
from support.threads import communicator_conformance as conformance
from support.threads.communicator_conformance import all_reduce
from support.threads.thread_ranks import errors_of_threads, run_thread_ranks, run_threads

RANKS = [1, 2, 3, 4, 7]


# Between ranks, threads are for tests: they need the contract, and ends that nobody waits for.


def raised(functions, timeout=5.0):
    """The exception (or None) of each rank; functions[r](communicator) runs on rank r."""
    hub = _C.ThreadHub(len(functions), timeout)
    communicators = [_C.ThreadCommunicator(hub, rank) for rank in range(len(functions))]
    return errors_of_threads(len(functions), lambda rank: functions[rank](communicators[rank]))


@pytest.mark.parametrize("n", RANKS, ids=lambda n: f"{n}-ranks")
def test_thread_ranks_conform(n):
    assert run_thread_ranks(n, conformance.run_all) == [(rank, n) for rank in range(n)]


@pytest.mark.parametrize("n", RANKS, ids=lambda n: f"{n}-ranks")
def test_all_reduce_adds_in_rank_order(n):
    stack = torch.randn(n, 4099, generator=torch.Generator().manual_seed(0))

    def run(comm):
        total, mean = stack[comm.rank].clone(), stack[comm.rank].clone()
        comm.all_reduce(total, _C.ReduceOp.SUM)
        comm.all_reduce(mean, _C.ReduceOp.AVG)
        return total, mean

    expected_total, expected_mean = stack[0].clone(), stack[0] / n
    for rank in range(1, n):
        expected_total += stack[rank]
        expected_mean += stack[rank] / n
    for total, mean in run_thread_ranks(n, run):
        assert torch.equal(total, expected_total)
        assert torch.equal(mean, expected_mean)


@over(disagreement=conformance.DISAGREEMENTS.values())
def test_ranks_that_disagree_all_raise_naming_both(disagreement):
    first, second, words = disagreement
    errors = raised([first, second, first])
    assert [type(error) for error in errors] == [_C.BaguaMismatchError] * 3
    for error in errors:
        assert all(word in str(error) for word in [*words, "rank 1"]), error


def send(*peers):
    return lambda comm: comm.exchange([(torch.zeros(1), peer) for peer in peers], [])


@over(call=[all_reduce(3), send(1, 2)])
def test_a_timeout_names_the_missing_ranks_and_later_calls_are_refused(call):
    hub = _C.ThreadHub(3, 0.1)
    with pytest.raises(_C.BaguaTimeoutError, match=r"rank 0 of 3: .*missing: rank 1, 2"):
        call(_C.ThreadCommunicator(hub, 0))
    with pytest.raises(_C.BaguaTimeoutError, match="missing: rank 1, 2"):
        all_reduce(3)(_C.ThreadCommunicator(hub, 1))


@over(call=[all_reduce(3), send(2)])
def test_abort_wakes_all_ranks_at_once(call):
    def abort(comm):
        time.sleep(0.1)  # lets the others block; they end by abort in either order
        comm.abort("no more data")

    start = time.monotonic()
    errors = raised([call, call, abort], timeout=60.0)
    assert time.monotonic() - start < 30
    for error in errors[:2]:
        assert "rank 2 of 3 aborted: no more data" in str(error)
        assert type(error) is _C.BaguaError


def count(comm):
    """One call of each kind with 120 bytes (30 floats); traffic of each, and the sum."""
    counting = _C.CountingCommunicator(comm)
    size, rank, peer = comm.size, comm.rank, (comm.rank + 1) % comm.size
    source = (comm.rank - 1) % comm.size
    tensor = torch.zeros(30)
    calls = {
        "all_reduce": lambda: counting.all_reduce(tensor, _C.ReduceOp.SUM),
        "all_gather": lambda: counting.all_gather(tensor, torch.zeros(30 * size)),
        "all_to_all": lambda: counting.all_to_all(torch.zeros(30 * size), torch.zeros(30 * size)),
        "broadcast": lambda: counting.broadcast(tensor, 1 % size),
        "exchange": lambda: counting.exchange(
            [(tensor, peer), (tensor, rank)], [(torch.zeros(30), source), (torch.zeros(30), rank)]
        ),
        "nothing": lambda: counting.all_gather(torch.zeros(0), torch.zeros(0)),
    }
    traffic = {}
    for name, call in calls.items():
        before = counting.traffic()
        call()
        after = counting.traffic()
        assert after["wire_ns"] > before["wire_ns"]
        keys = ["bytes_sent", "bytes_received", "messages_sent", "messages_received"]
        traffic[name] = [after[key] - before[key] for key in keys]
    return traffic


def test_the_counter_counts_the_bytes_of_each_call():
    (alone,) = run_thread_ranks(1, count)
    assert all(numbers == [0, 0, 0, 0] for numbers in alone.values())
    results = run_thread_ranks(4, count)
    for rank, traffic in enumerate(results):
        assert traffic["all_reduce"] == [180, 180, 6, 6]
        assert traffic["all_gather"] == [360, 360, 3, 3]
        assert traffic["all_to_all"] == [360, 360, 3, 3]
        assert traffic["exchange"] == [120, 120, 1, 1]
        assert traffic["nothing"] == [0, 0, 0, 0]
        children = {1: 2, 2: 1}.get(rank, 0)  # root 1 sends to 2 and 3, rank 2 passes on to 0
        received = 0 if rank == 1 else 1
        assert traffic["broadcast"] == [children * 120, received * 120, children, received]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13], ids=lambda size: f"{size}-ranks")
def test_counted_broadcasts_send_one_message_to_each_other_rank(size):
    def run(comm):
        counting = _C.CountingCommunicator(comm)
        counting.broadcast(torch.zeros(1), size - 1)
        return counting.traffic()["messages_sent"]

    assert sum(run_thread_ranks(size, run)) == size - 1


def test_the_counter_forwards_rank_size_and_abort():
    counting = _C.CountingCommunicator(_C.ThreadCommunicator(_C.ThreadHub(3, 1.0), 2))
    assert (counting.rank, counting.size) == (2, 3)
    counting.abort("the reason")
    with pytest.raises(_C.BaguaError, match="aborted: the reason"):
        counting.all_reduce(torch.zeros(1), _C.ReduceOp.SUM)
    assert counting.traffic()["bytes_sent"] == 0


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 3)
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return tcp if request.param == "tcp" else dist.PrefixStore("some/prefix", tcp)


def test_the_first_failure_stays_on_the_board_and_is_hidden_from_its_own_rank(store):
    boards = [_C.FailureBoard(store, rank, 3) for rank in range(3)]
    assert [board.poll() for board in boards] == [None, None, None]
    boards[1].publish("bucket 3: no memory")
    boards[2].publish("a consequence")
    told = "rank 1: bucket 3: no memory"
    assert [board.poll() for board in boards] == [told, None, told]


def test_a_rank_that_left_early_is_named(store):
    boards = [_C.FailureBoard(store, rank, 3) for rank in range(3)]
    assert boards[0].poll_exit(1) is None
    boards[2].publish_exit(7)
    boards[2].publish_exit(9)
    assert boards[0].poll_exit(7) is None
    assert boards[0].poll_exit(8) == "rank 2 exited after 7 rounds"
    assert boards[2].poll_exit(8) is None
    boards[1].publish_exit(12)
    boards[0].publish_exit(12)
    assert boards[1].poll_exit(12) == "rank 2 exited after 7 rounds"
    assert boards[2].poll_exit(13) == "rank 1 exited after 12 rounds"
    assert boards[0].poll() is None


def test_a_rank_that_fails_because_another_left_is_not_the_verdict(store):
    boards = [_C.FailureBoard(store, rank, 3) for rank in range(3)]
    boards[2].publish_exit(5)
    assert boards[1].poll_exit(6) == "rank 2 exited after 5 rounds"
    boards[1].publish("round 6: rank 2 exited after 5 rounds")
    verdict = boards[0].diagnose("round 6: rank 1 exited", 6, "round")
    assert verdict.startswith("rank 2 exited after 5 rounds\n  Seen here: round 6"), verdict


def test_all_ranks_can_exit_and_publish_at_the_same_time():
    shared = dist.HashStore()
    boards = [_C.FailureBoard(shared, rank, 8) for rank in range(8)]
    start = threading.Barrier(8)

    def run(rank):
        start.wait()
        boards[rank].publish_exit(rank)
        boards[rank].publish("late")

    run_threads(8, run)
    entries = shared.get("exits").decode().split()
    assert sorted(map(int, entries[::2])) == list(range(8))
    assert entries[::2] == entries[1::2]
    assert len({told for board in boards if (told := board.poll())}) == 1


def test_a_board_without_its_server_finds_nothing_and_does_not_raise():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    board = _C.FailureBoard(client, 0, 2)
    del server
    board.publish("nobody hears this")
    board.publish_exit(1)
    assert (board.poll(), board.poll_exit(9)) == (None, None)
