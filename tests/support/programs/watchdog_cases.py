"""What the watchdog of NcclCommunicator must see, on a fake CUDA over host memory.

Run as a program with the name of a case: the fake device stays in the process it is loaded into.
"""

import ctypes
import itertools
import os
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from bagua._core.group import connections as _transport
from support.programs.fake_nccl import FakeCuda, FakeNccl, build_fake_driver
from support.threads.thread_ranks import run_threads, wait_until

CUDA = torch.device("cuda", 1)
TIMEOUT = 0.4
REMOTE_ERROR = 6
INVALID_USAGE = 5

devices_used = {CUDA.index}
cuda = FakeCuda()
nccl = FakeNccl()
nccl.lead(cuda)
nccl.begin_thread = lambda: cuda.begin_rank(CUDA)


def all_reduce(comm, host):
    comm.all_reduce(cuda.on_device(host), _C.ReduceOp.SUM)


def until_done():
    """Waits for all work of the calling thread's stream."""
    stream, given = cuda.stream(), nccl.given(cuda.stream())
    wait_until(lambda: nccl.have_ended(stream, given), "the stream", 20)


def failure_of(comm):
    """Waits until the watchdog reports; (its words, seconds)."""
    start = time.monotonic()
    while (failure := comm.failure()) is None:
        assert time.monotonic() - start < 20
        time.sleep(0.005)
    return failure, time.monotonic() - start


def calls_run_on_the_current_stream_and_take_the_events_of_earlier_ones():
    calls = 100

    def run(comm):
        cuda.set_stream(8 * comm.rank + 7)
        hosts = [torch.ones(3) for _ in range(calls)]
        for host in hosts:
            all_reduce(comm, host)
            until_done()
            time.sleep(0.01)  # the watchdog, which looks every 50 ms, has seen the end of most
        assert nccl.last_stream() in (7, 15)
        assert comm.failure() is None
        assert all(host.tolist() == [2.0] * 3 for host in hosts)

    nccl.run(2, run, 10, CUDA)
    assert 0 < cuda.events_made() < 2 * 2 * calls
    assert cuda.events() == 0
    assert nccl.calls_of("ncclCommDestroy") == 2


def work_that_does_not_end_on_the_device_aborts_at_the_timeout():
    def run(comm):
        host = torch.ones(3)
        start = time.monotonic()
        all_reduce(comm, host)
        assert time.monotonic() - start < TIMEOUT / 2, "the call waited for the device"
        failure, seconds = failure_of(comm)
        words = f"rank {comm.rank} of 2: all_reduce of 12 bytes float32 failed: not finished on the"
        assert words in failure
        assert "within 0.4 s" in failure
        assert TIMEOUT / 2 < seconds < 10
        with pytest.raises(_C.BaguaTimeoutError, match="all_gather refused: an earlier"):
            comm.all_gather(cuda.on_device(host), cuda.on_device(torch.ones(6)))

    cuda.hold(1)
    nccl.run(2, run, TIMEOUT, CUDA)
    assert nccl.calls_of("ncclCommAbort") == 2


def work_behind_a_long_kernel_of_the_caller_is_not_late():
    """The timeout of a call begins when its stream has come to it."""

    def run(comm):
        host = torch.ones(3)
        if comm.rank == 0:
            nccl.occupy(cuda.stream())
        all_reduce(comm, host)
        if comm.rank == 0:
            time.sleep(3 * TIMEOUT)
            assert comm.failure() is None
            nccl.release()
        until_done()
        return comm.failure(), host[0].item()

    store = dist.HashStore()
    outcomes = [None, None]

    def rank_of(rank):
        nccl.begin_thread()
        timeout = [TIMEOUT, 60][rank]  # rank 1's call has begun at once
        outcomes[rank] = run(nccl.connect(store, rank, 2, timeout, CUDA))

    run_threads(2, rank_of)
    assert outcomes == [(None, 2.0)] * 2


def a_failure_ends_a_communicator_whose_device_cannot_be_set():
    """As after an illegal access in a kernel of the user's: cudaSetDevice returns that error."""

    def run(comm):
        host = torch.ones(3)
        all_reduce(comm, host)
        until_done()
        barrier.wait()
        cuda.set_device(0)
        barrier.wait()
        cuda.refuse(1)
        comm.abort("no more")
        assert comm.failure() == "aborted: no more"
        del comm
        barrier.wait()
        cuda.refuse(0)

    barrier = threading.Barrier(2)
    nccl.look_at_devices(None)
    devices_used.add(0)
    nccl.run(2, run, 60, CUDA)


def an_error_that_nccl_reports_about_work_on_the_device_aborts_at_once():
    def run(comm):
        host = torch.ones(3)
        all_reduce(comm, host)
        if comm.rank == 0:
            time.sleep(0.1)
            nccl.__getattr__("break")(0, REMOTE_ERROR)
            failure, seconds = failure_of(comm)
            assert "all_reduce of 12 bytes float32 failed: NCCL reports remote error" in failure
            assert seconds < 5
            with pytest.raises(_C.BaguaError) as raised:
                all_reduce(comm, host)
            assert raised.type is _C.BaguaError
        comm.abort("done")

    cuda.hold(1)
    nccl.run(2, run, 60, CUDA)


def an_error_of_the_device_is_kept():
    def run(comm):
        host = torch.ones(3)
        all_reduce(comm, host)
        failure, _ = failure_of(comm)
        assert failure == "the device reports: an illegal memory access was encountered"

    getattr(cuda, "break")()
    nccl.run(2, run, 60, CUDA)


def abort_with_work_on_the_device_is_quick_and_so_is_dropping():
    def run(comm):
        host = torch.ones(3)
        all_reduce(comm, host)
        comm.abort("no more")
        assert comm.failure() == "aborted: no more"
        del comm

    cuda.hold(1)
    start = time.monotonic()
    nccl.run(2, run, 60, CUDA)
    assert time.monotonic() - start < 20


def a_process_ends_while_an_abort_hangs():
    """As where the stream stands behind another communicator's kernel whose peer is dead."""

    def run(comm):
        all_reduce(comm, kept[comm.rank])
        failure, _ = failure_of(comm)
        assert "not finished on the device" in failure
        with pytest.raises(_C.BaguaTimeoutError, match="all_reduce refused: an earlier"):
            all_reduce(comm, kept[comm.rank])

    kept = [torch.ones(3), torch.ones(3)]
    sys.modules["kept"] = kept  # the hanging abort may still write into them
    nccl.hang_aborts(1)
    cuda.hold(1)
    nccl.run(2, run, TIMEOUT, CUDA)
    raise SystemExit(0)


def threads_of_a_communicator_leave_captures_of_others_alone():
    """The watchdog, which asks for events, and the thread that aborts."""

    def run(comm):
        host = torch.ones(3)  # must outlive the kernel
        all_reduce(comm, host)
        until_done()
        watchdogs = driver.fake_driver_threads_in_thread_local_mode
        wait_until(lambda: watchdogs() == 2, "both watchdogs", 20)
        barrier.wait()
        comm.abort("no more")

    driver = ctypes.CDLL(build_fake_driver())
    barrier = threading.Barrier(2)
    nccl.run(2, run, 60, CUDA)
    assert driver.fake_driver_threads_in_thread_local_mode() == 4
    assert driver.fake_driver_threads_in_another_mode() == 0


def communicators_are_made_on_their_device_by_a_thread_of_another():
    """As Python's main thread does, whose calls run on a thread that begins on device 0."""

    def run(comm):
        host = torch.ones(3)
        part = comm.split([0, 1])
        for communicator in (comm, part):
            all_reduce(communicator, host)
            until_done()
        return host.tolist()

    nccl.begin_thread = lambda: cuda.set_stream(next(streams))
    streams = itertools.count(8, 8)
    assert nccl.run(2, run, 20, CUDA) == [[4.0] * 3] * 2
    assert nccl.devices() == 1 << CUDA.index
    devices_used.add(0)  # the threads'


def a_forked_child_leaves_the_communicator_to_its_parent():
    def run(comm):
        host = torch.ones(3)
        all_reduce(comm, host)
        calls = nccl.calls_of("ncclCommFinalize")
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                del comm
                os._exit(nccl.calls_of("ncclCommFinalize") - calls)
            assert os.waitpid(child, 0)[1] == 0
        all_reduce(comm, host)
        until_done()
        return host[0].item()

    assert nccl.run(2, run, 20, CUDA) == [4.0, 4.0]


def on_ranks(function):
    """function(connections) on two ranks that are threads, each with a separate GPU."""
    store = dist.HashStore()
    _transport.nccl_library = lambda: nccl.library
    results = [None, None]

    def run(rank):
        nccl.begin_thread()
        connections = _transport.Connections(store, rank, [0, 1], timedelta(seconds=20))
        try:
            results[rank] = function(connections)
        except Exception as error:  # noqa: BLE001 - the cases look at it
            results[rank] = error

    run_threads(2, run)
    return results


def a_transport_connects_cuda_tensors_through_nccl():
    _transport.gpu_identity = lambda device: str(threading.get_ident())

    def run(connections):
        comm = connections.connect("lane0/all", CUDA)
        host = torch.full((4,), connections.rank + 1.0)
        all_reduce(comm, host)
        until_done()
        return host.tolist(), comm.traffic()["bytes_sent"]

    assert on_ranks(run) == [([3.0] * 4, 16)] * 2
    assert nccl.calls_of("ncclAllReduce") == 2


def one_queue_for_all_streams_is_warned_of():
    _transport.gpu_identity = lambda device: str(threading.get_ident())
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(lambda connections: connections.connect("all", CUDA))
    (text,) = {str(warning.message) for warning in caught}
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams of a GPU one queue" in text
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    on_ranks(lambda connections: connections.connect("again", CUDA))


def a_rank_may_have_several_devices():
    _transport.gpu_identity = lambda device: str(threading.get_ident())

    def run(connections):
        here = [torch.device("cuda", 2 + 2 * connections.rank + i) for i in range(2)]
        comms = [connections.main_communicator(device) for device in here]
        assert connections.main_communicator(here[0]) is comms[0] is not comms[1]
        labels = [connections.label(device) for device in here]
        with pytest.raises(_C.BaguaError, match="this communicator moves tensors of"):
            comms[1].all_reduce(cuda.on_device(torch.ones(3)), _C.ReduceOp.SUM)
        return labels

    devices_used.update(range(2, 6))
    found = on_ranks(run)
    assert found == [["cuda", "cuda.1"]] * 2, found


def ranks_that_share_a_gpu_are_told_to_set_their_device():
    _transport.gpu_identity = lambda device: "GPU-7"
    nccl.fail(1, -1, INVALID_USAGE)  # its duplicate check
    for rank, error in enumerate(on_ranks(lambda connections: connections.connect("all", CUDA))):
        assert isinstance(error, _C.BaguaError), error
        assert "ranks 0, 1 use one GPU" in str(error), error
        assert f"rank {rank}'s tensors are on cuda:1" in str(error)
        assert 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))' in str(error)


def a_process_may_end_with_communicators_and_work_in_flight():
    kept = []

    def run(comm):
        kept.append((comm, torch.ones(3)))
        all_reduce(*kept[-1])

    cuda.hold(1)
    nccl.run(2, run, 60, CUDA)
    sys.modules["kept"] = kept
    raise SystemExit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    misuse = nccl.misuse().decode()
    assert not misuse, misuse
    assert nccl.alive() == 0, "communicators are left over"
    expected = sum(1 << index for index in devices_used)
    assert cuda.contexts() == expected, "a context on a device of another rank"
