"""NcclCommunicator over a fake NCCL on host memory: conformance, splits, failures, the end."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from single import communicator_conformance as conformance

if not _C.has_nccl:
    pytest.skip("this build has no nccl.h", allow_module_level=True)

from single.fake_nccl import FakeNccl

RANKS = [1, 2, 3, 4, 7]
REMOTE_ERROR = 6
SUM = _C.ReduceOp.SUM


@pytest.fixture(scope="module")
def loaded():
    return FakeNccl()


@pytest.fixture
def nccl(loaded):
    """The fake without faults; what a test leaves behind or did wrong fails it."""
    loaded.reset()
    before = loaded.alive()
    yield loaded
    assert loaded.misuse().decode() == ""
    assert loaded.alive() == before, "communicators are left over"


def all_reduce(comm):
    comm.all_reduce(torch.ones(3), SUM)


def errors_of(outcomes):
    return [error for _, error in outcomes]


def error_of(call):
    """What a call raises, as (type, message, seconds)."""
    start = time.monotonic()
    with pytest.raises(_C.BaguaError) as raised:
        call()
    return raised.type, str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("size", conformance.SIZES, ids=lambda size: f"{size}-elements")
@pytest.mark.parametrize("dtype", conformance.DTYPES.values(), ids=conformance.DTYPES)
@pytest.mark.parametrize("n", RANKS, ids=lambda n: f"{n}-ranks")
def test_nccl_ranks_conform(nccl, n, dtype, size):
    def run(comm):
        for check in conformance.CHECKS:
            check(comm, dtype, size)
        return comm.rank, comm.size

    assert nccl.run(n, run) == [(rank, n) for rank in range(n)]


@pytest.mark.parametrize("n", RANKS, ids=lambda n: f"{n}-ranks")
@pytest.mark.parametrize("check", conformance.ONCE, ids=lambda check: check.__name__)
def test_nccl_ranks_conform_in_special_cases(nccl, n, check):
    assert nccl.run(n, check) == [None] * n


def test_calls_that_nccl_has_in_progress_for_long_are_waited_for(nccl):
    nccl.set_polls(500)
    nccl.run(3, lambda comm: [check(comm, torch.float32, 31) for check in conformance.CHECKS])


def test_a_group_of_one_never_touches_nccl(nccl):
    comm = _C.NcclCommunicator(nccl.library, dist.HashStore(), 0, 1, torch.device("cpu"), 1.0)
    conformance.run_all(comm)
    assert comm.split([0]).size == 1
    assert nccl.calls_of("ncclCommInitRankConfig") == nccl.calls_of("ncclAllReduce") == 0


def test_the_average_is_ncclavg_and_an_exchange_is_one_group(nccl):
    def run(comm):
        comm.all_reduce(torch.ones(3), _C.ReduceOp.AVG)
        comm.all_to_all(torch.ones(4), torch.ones(4))

    nccl.run(2, run)
    names = ["ncclAllReduce", "ncclGroupEnd", "ncclSend", "ncclRecv"]
    assert [nccl.calls_of(name) for name in names] == [2, 2, 4, 4]


def test_dtypes_that_nccl_cannot_add_are_moved_and_not_reduced(nccl):
    def run(comm):
        shorts = torch.full((3,), 300 + comm.rank, dtype=torch.int16)
        gathered = torch.zeros(6, dtype=torch.int16)
        comm.all_gather(shorts, gathered)
        with pytest.raises(_C.BaguaError, match="NCCL does not reduce int16"):
            comm.all_reduce(shorts, SUM)
        all_reduce(comm)
        return gathered.tolist()

    assert nccl.run(2, run) == [[300] * 3 + [301] * 3] * 2


def test_tensors_of_another_device_are_refused(nccl):
    def run(comm):
        with pytest.raises(_C.BaguaError, match=r"all_reduce: the tensor is on meta, .* of cpu"):
            comm.all_reduce(torch.ones(3, device="meta"), SUM)

    nccl.run(2, run)


def test_split_makes_groups_that_work_beside_their_parent(nccl):
    def run(comm):
        node = [0, 1, 2] if comm.rank < 3 else [4, 3]
        inner = comm.split(node)
        leaders = comm.split([3, 0])
        ones = torch.full((2,), float(comm.rank))
        inner.all_reduce(ones, SUM)
        if leaders is not None:
            leaders.broadcast(ones, 0)
        all_reduce(comm)
        inner.broadcast(ones, node.index(min(node)))
        return inner.rank, inner.size, leaders and leaders.rank, ones[0].item()

    assert nccl.run(5, run) == [
        (0, 3, 1, 7.0),
        (1, 3, None, 7.0),
        (2, 3, None, 7.0),
        (1, 2, 0, 7.0),
        (0, 2, None, 7.0),
    ]


def test_a_split_of_one_rank_is_answered_by_all_and_needs_no_nccl(nccl):
    def run(comm):
        alone = comm.split([comm.rank])
        alone.all_reduce(torch.ones(1), SUM)
        all_reduce(comm)
        return alone.size

    assert nccl.run(3, run) == [1, 1, 1]


def test_a_failed_parent_splits_no_more_and_its_children_go_on(nccl):
    def run(comm):
        child = comm.split([0, 1])
        comm.abort("enough")
        with pytest.raises(_C.BaguaError, match="split refused: aborted: enough"):
            comm.split([0, 1])
        all_reduce(child)

    nccl.run(2, run)


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
            while True:
                all_reduce(comm)
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


def test_ranks_that_disagree_are_told_what_nccl_said(nccl):
    def run(comm):
        return error_of(lambda: comm.all_reduce(torch.ones(3 + comm.rank), SUM))[1]

    for message in nccl.run(2, run):
        assert "invalid usage (ranks disagree about a collective)" in message


def test_what_a_callback_throws_is_no_business_of_exchange_but_ends_the_communicator(nccl):
    def run(comm):
        counting = _C.CountingCommunicator(comm)
        counting.exchange([(torch.ones(2), comm.rank)], [(torch.ones(2), comm.rank)])
        return counting.traffic()["messages_sent"]

    assert nccl.run(2, run) == [0, 0]


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

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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


@pytest.mark.parametrize(
    ("rank", "size", "timeout", "message"),
    [(2, 2, 1.0, "rank 2 is outside"), (0, 2, 0.0, "timeout must be positive")],
    ids=["rank", "timeout"],
)
def test_impossible_arguments_are_refused(nccl, rank, size, timeout, message):
    with pytest.raises(ValueError, match=message):
        nccl.connect(dist.HashStore(), rank, size, timeout)


def test_an_old_library_is_refused_by_its_version(nccl):
    nccl.set_version(21705)
    with pytest.raises(_C.BaguaError, match=r"is NCCL 2\.17\.5; bagua needs 2\.18\.1 or newer"):
        _C.NcclLibrary.open(nccl.library.path)
