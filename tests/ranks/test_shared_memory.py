"""SharedMemoryCommunicator: failures that name the peer and end in time."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bagua import _C
from support.threads import communicator_conformance as conformance

LATE_SECONDS = 1.0
SECONDS_UNTIL_SEEN = 15.0  # that a peer has ended, on a busy machine; the time-out is a minute


def connect(name="own", timeout=60.0, node=0, refusal=""):
    """(communicator, reason why there is none)"""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    meeting = _C.Gathering(store, "offer", rank, size, timeout)
    return meeting.share_memory(node, refusal)[:2]


def connected(timeout=60.0):
    comm, reason = connect(timeout=timeout)
    assert comm is not None, reason
    return comm


def error_of(call):
    """Type name and message of what a call raises, and the seconds it took."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the tests look at it
        return type(error).__name__, str(error), time.monotonic() - start
    return None, "", time.monotonic() - start


CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(torch.zeros(300), _C.ReduceOp.SUM),
    "large all_reduce": lambda comm: comm.all_reduce(torch.zeros(2**20), _C.ReduceOp.SUM),
    "all_gather": lambda comm: comm.all_gather(torch.zeros(300), torch.zeros(900)),
    "all_to_all": lambda comm: comm.all_to_all(torch.zeros(300), torch.zeros(300)),
    "broadcast": lambda comm: comm.broadcast(torch.zeros(300), 2),
    "exchange": lambda comm: comm.exchange([], [(torch.zeros(300), 2)]),
}


def default_group():
    return _C.C10dCommunicator(dist.group.WORLD._get_backend(torch.device("cpu")))


def die_on_rank_two(name, over_gloo):
    """Rank 2 dies, and leaves a child that holds all of its files, as a loader of data would."""
    comm = default_group() if over_gloo else connected()
    comm.broadcast(torch.zeros(1), 0)
    if comm.rank == 2:
        if not over_gloo and os.fork() == 0:
            time.sleep(3.0)
        os.kill(os.getpid(), signal.SIGKILL)
    kind, message, seconds = error_of(lambda: CALLS[name](comm))
    print(f"{seconds:.1f} {kind} {message}")
    sys.stdout.flush()
    os._exit(0)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch.distributed as dist
dist.init_process_group("gloo")
from ranks import {module}
{module}.{call}
"""


def script(call, module="test_shared_memory"):
    """Makes a call of a test module in processes of their own."""
    tests = os.path.dirname(os.path.dirname(__file__))
    return SCRIPT.format(tests=tests, module=module, call=call)


@pytest.mark.parametrize("over_gloo", [False, True], ids=["memory", "gloo"])
@pytest.mark.parametrize("name", CALLS)
def test_a_killed_rank_is_named_at_once(run_script, name, over_gloo):
    done = run_script(3, script(f"die_on_rank_two({name!r}, {over_gloo})"))
    texts = [done[rank].stdout for rank in (0, 1)]
    for rank, text in enumerate(texts):
        seconds, kind, message = text.split(" ", 2)
        assert kind == "BaguaError", done[rank].stderr
        assert message.startswith(f"rank {rank} of 3: {name.split()[-1]} of ")
        assert "failed: " in message
        assert float(seconds) < SECONDS_UNTIL_SEEN
    if over_gloo and "reduce" in name:  # a ring that breaks shows at any neighbour
        return
    # The other one may have seen first that this one gave up.
    said = "with peer 2 failed: " + ("" if over_gloo else "the peer's process has ended")
    assert any(said in text for text in texts), texts


def stop_on_rank_two():
    comm = connected(timeout=LATE_SECONDS)
    comm.broadcast(torch.zeros(1), 0)
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    kind, message, seconds = error_of(lambda: CALLS["all_reduce"](comm))
    print(f"{seconds:.1f} {kind} {message}")
    if comm.rank == 0:
        time.sleep(1.0)
        os.kill(pids[2], signal.SIGCONT)
    sys.stdout.flush()
    os._exit(0)


def test_a_stopped_rank_is_a_timeout_and_an_error_when_it_goes_on(run_script):
    *others, stopped = run_script(3, script("stop_on_rank_two()"))
    texts = [end.stdout.split(" ", 2) for end in others]
    assert any(
        kind == "BaguaTimeoutError" and "with peer 2 failed: Timed out waiting 1000ms" in message
        for _, kind, message in texts
    ), texts
    for seconds, kind, _ in texts:
        assert kind in ("BaguaTimeoutError", "BaguaError")
        assert LATE_SECONDS - 0.2 < float(seconds) < LATE_SECONDS + 2.0
    assert "the peer gave up a call" in stopped.stdout, stopped.stderr


def call_in_a_child():
    comm = connected()
    child = os.fork()
    if child == 0:
        _, message, _ = error_of(lambda: CALLS["all_reduce"](comm))
        del comm
        os._exit(0 if "of process" in message and "child" in message else 1)
    assert os.waitpid(child, 0)[1] == 0
    total = torch.ones(3)
    comm.all_reduce(total, _C.ReduceOp.SUM)  # the child's end has changed nothing
    return total.tolist()


def test_a_forked_child_can_neither_call_nor_disturb(ranks):
    assert ranks(2, call_in_a_child, fresh=True) == [[2.0] * 3] * 2


def files_of_a_new_program():
    comm = connected()
    program = "import os; print(*[os.readlink(f'/proc/self/fd/{fd}') for fd in range(3, 200) "
    program += "if os.path.exists(f'/proc/self/fd/{fd}')])"
    command = [sys.executable, "-S", "-c", program]
    seen = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True)
    conformance.broadcast_gives_the_values_of_every_root(comm, torch.float32, 3)
    return seen.stdout


def test_exec_inherits_nothing(ranks):
    for seen in ranks(2, files_of_a_new_program):
        assert "memfd" not in seen
        assert "pidfd" not in seen


def connect_with_a_limit(limit, value):
    """With None for a value: one file more than are open."""
    if dist.get_rank() == 1:
        hard = resource.getrlimit(limit)[1]
        value = value or len(os.listdir("/proc/self/fd")) + 1
        resource.setrlimit(limit, (value, hard))
    return connect()[1]


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [
        (resource.RLIMIT_FSIZE, 1 << 20, r"rank 1: shared memory of \d+ bytes is more than"),
        (resource.RLIMIT_NOFILE, None, r"rank 1: .*(Too many open files|limit of open files)"),
    ],
    ids=["file size", "open files"],
)
def test_a_limit_of_one_rank_is_the_same_reason_on_all_and_no_signal(ranks, limit, value, reason):
    reasons = ranks(3, connect_with_a_limit, limit, value, fresh=True)
    assert len(set(reasons)) == 1
    assert re.search(reason, reasons[0])


def sockets_of_the_machine():
    """(inode, name) of every Unix socket."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {(words[6], words[7] if len(words) > 7 else "") for words in lines}


def own_sockets():
    """Inodes of this process's Unix sockets."""
    links = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
    return [inode for inode, _ in sockets_of_the_machine() if f"socket:[{inode}]" in links]


def be_killed_somewhere(seed):
    comm = connected()
    print(*own_sockets(), flush=True)
    delay = random.Random(seed).random() * 0.05
    if comm.rank == seed % 2:
        threading.Timer(delay, os.kill, [os.getpid(), signal.SIGKILL]).start()
    call = CALLS[("all_reduce", "large all_reduce", "all_to_all")[seed % 3]]
    while error_of(lambda: call(comm))[0] is None:
        pass
    os._exit(7)


KILLS = int(os.environ.get("BAGUA_TEST_EXITS", "6"))  # each call, and each of the ranks in it


def test_killed_jobs_leave_nothing_behind(run_script):
    before = set(os.listdir("/dev/shm"))
    for seed in range(KILLS):
        ends = run_script(2, script(f"be_killed_somewhere({seed})"), timeout=30.0)
        assert [end.returncode for end in ends].count(-signal.SIGKILL) == 1, ends
        assert 7 in [end.returncode for end in ends], ends
        sockets = {inode for end in ends for inode in end.stdout.split()}
        assert len(sockets) >= 2
        assert not sockets & {inode for inode, _ in sockets_of_the_machine()}
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "bagua" in name]
