"""NcclCommunicator over a fake NCCL: timeouts, aborts, errors of NCCL, connecting, and the end."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from support.threads.thread_ranks import run_threads

REMOTE_ERROR = 6
SUM = _C.ReduceOp.SUM


def all_reduce(comm):
    comm.all_reduce(torch.ones(3), SUM)


def all_reduce_forever(comm):
    while True:
        all_reduce(comm)


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def errors_of(outcomes):
    return [error for _, error in outcomes]


def error_of(call):
    """The exception of a call, as (type, message, seconds)."""
    start = time.monotonic()
    with pytest.raises(_C.BaguaError) as raised:
        call()
    return raised.type, str(raised.value), time.monotonic() - start


def test_a_rank_that_never_calls_is_a_timeout_that_ends_the_communicator(nccl):
    def late(comm):
        while not (failure := comm.failure()):
            with pytest.raises(_C.BaguaError):
                comm.broadcast(torch.ones(1), 0)
        return failure

    def call(comm):
        first = error_of(lambda: comm.exchange([], [(torch.ones(1024), 1)]))
        second = error_of(lambda: comm.all_gather(torch.ones(1), torch.ones(2)))
        return first, second, comm.failure()

    nccl.stall(1)
    (outcome, error), _ = nccl.ranks([call, late], timeout=0.3)
    assert error is None
    (kind, message, seconds), (later_kind, later, later_seconds), failure = outcome
    assert kind is later_kind is _C.BaguaTimeoutError
    assert "rank 0 of 2: exchange of 4096 bytes float32 with peer 1 failed" in message
    assert "within 0.3 s" in message
    assert 0.25 < seconds < 10
    assert "rank 0 of 2: all_gather refused: an earlier call failed (" + message in later
    assert later_seconds < 0.2
    assert message in failure


def test_abort_from_another_thread_ends_a_call_in_flight(nccl):
    def call(comm):
        timer = threading.Timer(0.2, comm.abort, ["the user pressed a key"])
        timer.start()
        blocked = error_of(lambda: all_reduce(comm))
        timer.join()
        return blocked, error_of(lambda: all_reduce(comm)), comm.failure()

    nccl.stall(1)
    (outcome, error), _ = nccl.ranks([call, lambda comm: None], timeout=60)
    assert error is None
    (kind, blocked, seconds), (_, later, _), failure = outcome
    assert kind is _C.BaguaError
    assert seconds < 20
    expected = "rank 0 of 2: all_reduce of 12 bytes float32 failed: aborted: the user pressed a key"
    assert blocked == expected
    assert later == "rank 0 of 2: all_reduce refused: aborted: the user pressed a key"
    assert failure == "aborted: the user pressed a key"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_of_an_aborted_communicator_become_nan_and_others_stay(nccl, dtype):
    def run(comm):
        result = torch.ones(1025, dtype=dtype)
        comm.invalidate_if_aborted(result)
        assert result.eq(1).all()
        comm.abort("a peer is gone")
        comm.invalidate_if_aborted(result)
        return result.isnan().all().item()

    assert nccl.run(2, run) == [True, True]


def test_aborts_from_many_threads_during_calls_leave_one_reason(nccl):
    def run(comm):
        start = threading.Barrier(5)

        def abort(number):
            start.wait()
            comm.abort(f"number {number}")

        threads = [threading.Thread(target=abort, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        start.wait()
        with pytest.raises(_C.BaguaError, match="aborted: number"):
            all_reduce_forever(comm)
        for thread in threads:
            thread.join()
        reason = comm.failure()
        comm.abort("too late")
        assert comm.failure() == reason

    for _ in range(10):
        nccl.run(2, run, timeout=5)


def test_an_error_that_nccl_reports_is_typed_and_names_the_call(nccl):
    nccl.fail(1, 2, REMOTE_ERROR)

    def run(comm):
        for _ in range(2):
            all_reduce(comm)
        return error_of(lambda: comm.broadcast(torch.ones(5), 0))

    _, (outcome, error) = nccl.ranks([run, run], timeout=0.5)
    assert error is None
    kind, message, _ = outcome
    assert kind is _C.BaguaError
    assert "rank 1 of 2: broadcast of 20 bytes float32 with peer 0 failed: " in message
    assert "NCCL reports remote error (a fault that was asked for)" in message


def test_an_error_between_two_calls_is_thrown_by_the_next(nccl):
    together = threading.Barrier(2)

    def run(comm):
        all_reduce(comm)
        together.wait()
        if comm.rank == 1:
            nccl.__getattr__("break")(1, REMOTE_ERROR)
            kind, message, _ = error_of(lambda: all_reduce(comm))
            assert kind is _C.BaguaError
            assert message.startswith("rank 1 of 2: all_reduce refused: an earlier call failed: ")
            assert "remote error (the cable was pulled)" in comm.failure()

    nccl.run(2, run)


def test_ranks_that_disagree_get_the_error_of_nccl(nccl):
    def run(comm):
        return error_of(lambda: comm.all_reduce(torch.ones(3 + comm.rank), SUM))[1]

    for message in nccl.run(2, run):
        assert "invalid usage (ranks disagree about a collective)" in message


def test_connecting_names_the_ranks_that_have_not_come(nccl):
    store = dist.HashStore()
    kind, message, seconds = error_of(lambda: nccl.connect(store, 0, 4, timeout=0.3))
    assert kind is _C.BaguaTimeoutError
    assert "rank 0 of 4: connecting through NCCL failed: not done within 0.3 s" in message
    assert message.endswith("missing: rank 1, 2, 3")
    assert seconds < 10


def test_connecting_without_rank_zero_says_that_its_id_is_missing(nccl):
    kind, message, _ = error_of(lambda: nccl.connect(dist.HashStore(), 1, 2, timeout=0.3))
    assert kind is _C.BaguaTimeoutError
    assert "rank 1 of 2: connecting through NCCL failed: rank 0 has not handed over" in message


def test_connecting_that_nccl_does_not_finish_ends_at_the_timeout(nccl):
    nccl.never_connect()
    for error in errors_of(nccl.ranks([all_reduce, all_reduce], timeout=0.3)):
        assert type(error) is _C.BaguaTimeoutError
        assert "all ranks have come and NCCL does not connect them" in str(error)
        assert "NCCL_SOCKET_IFNAME" in str(error)


def test_a_rank_that_cannot_connect_tells_the_others(nccl):
    nccl.fail(1, -1, REMOTE_ERROR)
    first, second = errors_of(nccl.ranks([all_reduce, all_reduce], timeout=60))
    assert "NCCL reports remote error (a fault that was asked for)" in str(second)
    assert type(first) is _C.BaguaError
    assert "another rank gave up, rank 1: rank 1 of 2: connecting" in str(first)


def test_an_id_that_nccl_does_not_make_is_an_error_on_all_ranks(nccl):
    nccl.make_no_id()
    first, second = errors_of(nccl.ranks([all_reduce, all_reduce], timeout=60))
    assert "rank 0 of 2" in str(first)
    assert "makes no id for the group: system error" in str(first)
    assert "another rank gave up, rank 0: " in str(second)


def test_the_id_goes_through_any_store_with_all_its_bytes(nccl, tmp_path):
    stores = [
        dist.FileStore(str(tmp_path / "store"), 2),
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    ]
    for store in stores:
        results = [None, None]

        def run(rank, store=store, results=results):
            comm = nccl.connect(dist.PrefixStore("lane", store), rank, 2)
            tensor = torch.ones(1)
            comm.all_reduce(tensor, SUM)
            results[rank] = tensor.item()

        run_threads(2, run)
        assert results == [2.0, 2.0]


def test_a_dropped_communicator_is_finalized_and_destroyed(nccl):
    nccl.run(3, all_reduce)
    names = ["ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"]
    assert [nccl.calls_of(name) for name in names] == [3, 3, 0]


def test_a_communicator_that_does_not_get_quiet_is_aborted_after_the_timeout(nccl):
    nccl.never_quiet()
    start = time.monotonic()
    nccl.run(2, all_reduce, timeout=0.3)
    assert 0.25 < time.monotonic() - start < 10
    assert [nccl.calls_of(name) for name in ["ncclCommDestroy", "ncclCommAbort"]] == [0, 2]


def test_an_abort_that_hangs_holds_up_neither_a_call_nor_the_end(nccl):
    def run(comm):
        if comm.rank == 1:
            return None
        with pytest.raises(_C.BaguaTimeoutError, match=r"could not start it within 0\.3 s"):
            all_reduce(comm)
        with pytest.raises(_C.BaguaTimeoutError, match="an earlier call failed"):
            all_reduce(comm)
        return comm.failure()

    nccl.hang_aborts(1)
    before = nccl.alive()
    assert "all_reduce of" in nccl.run(2, run, timeout=0.3)[0]
    assert nccl.alive() > before, "the abort has ended"
    nccl.hang_aborts(0)
    until(lambda: nccl.alive() == before)


@pytest.mark.parametrize(
    ("rank", "size", "timeout", "message"),
    [(2, 2, 1.0, "rank 2 is outside"), (0, 2, 0.0, "timeout must be positive")],
    ids=["rank", "timeout"],
)
def test_impossible_arguments_are_refused(nccl, rank, size, timeout, message):
    with pytest.raises(ValueError, match=message):
        nccl.connect(dist.HashStore(), rank, size, timeout)


def test_an_old_library_is_refused_by_its_version(nccl):
    nccl.set_version(22705)
    with pytest.raises(_C.BaguaError, match=r"is NCCL 2\.27\.5; bagua needs 2\.27\.6 or newer"):
        _C.NcclLibrary.open(nccl.library.path)
