"""Runs situations on ranks that are forked from this process, which has imported all they need.

Ranks receive one situation and implementation at a time and answer with values. A rank that raises
ends, as a script would; then, and when ranks hang, all are replaced by new ones.
"""

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from ranks.situations.houses import HOUSES, NotApplicableError

PR_SET_PDEATHSIG = 1
SECONDS_AFTER_FIRST_FAILURE = 12.0
SECONDS_FOR_STACKS = 1.0
TIMEOUT = datetime.timedelta(seconds=20)
# torch's stores look up the name of every client; without a name server that answers, each look-up
# may stop them for five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@dataclass
class RankOutcome:
    """kind: done, raised, absent, hangs or died. text: a traceback or stacks; error: its last
    line."""

    kind: str
    values: dict = field(default_factory=dict)
    text: str = ""
    error: str = ""
    warnings: list = field(default_factory=list)


@dataclass
class Outcome:
    """Outcome of one situation on all ranks under one implementation."""

    ranks: list
    seconds: float = 0.0


def fork(function, *args):
    """The pid of a process that runs `function(*args)` and ends as Python does after a script."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        function(*args)
        status = 0
    except BaseException:  # noqa: BLE001 - as at the end of a script
        traceback.print_exc()
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError("unreachable")


def _serve_store(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(pipe, str(store.port).encode())
    while True:
        time.sleep(60)


def _environment(rank, size, port, number):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": f"situations-{port}-{number}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _run(row, house):
    """The outcome of one situation on this rank."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            values = row.run(house, dist.get_rank(), dist.get_world_size())
            outcome = RankOutcome("done", flat(values))
        except NotApplicableError as error:
            outcome = RankOutcome("absent", text=str(error))
        except BaseException as error:  # noqa: BLE001 - everything is reported
            text = f"{type(error).__name__}: {error}"
            outcome = RankOutcome("raised", text=traceback.format_exc(), error=text)
    outcome.warnings = [str(warning.message) for warning in caught]
    return outcome


def flat(values, prefix=""):
    """Nested dicts as one, names joined by dots; tensors as copies."""
    result = {}
    for name, value in values.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            result[prefix + name] = value.detach().clone()
        else:
            result[prefix + name] = value
    return result


def _serve_rank(table, rank, size, port, number, pipes, folder):
    """The body of a rank: situations until the pipe closes or one raises."""
    connection = pipes[rank]
    for other in pipes:
        if other is not connection:
            other.close()
    output = os.open(folder / f"output-{number}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = open(folder / f"stacks-{number}-{rank}", "w")  # noqa: SIM115 - until the end
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    os.environ.update(_environment(rank, size, port, number))
    store = dist.PrefixStore(f"ranks{number}", dist.TCPStore("127.0.0.1", port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    while True:
        try:
            index, name = connection.recv()
        except EOFError:
            return
        house = HOUSES[name]
        outcome = _run(table[index], house)
        connection.send((outcome.kind, pickled(outcome)))
        if outcome.kind == "raised":
            break
        gc.collect()
        house.close()
    with contextlib.suppress(Exception):
        house.close()


def pickled(outcome):
    """The outcome as bytes without shared memory, which torch's own pickling over pipes uses."""
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    return buffer.getvalue()


def unpickled(data):
    return torch.load(io.BytesIO(data), weights_only=False)


class Ranks:
    """Forked ranks that wait for situations."""

    def __init__(self, table, size, port, number, folder):
        pairs = [multiprocessing.Pipe() for _ in range(size)]
        theirs = [pair[1] for pair in pairs]
        self.connections = [pair[0] for pair in pairs]
        self.folder, self.number, self.size = folder, number, size
        self.used = False
        self.pids = []
        for rank in range(size):
            self.pids.append(fork(self._child, table, rank, port, theirs))
        for connection in theirs:
            connection.close()

    def _child(self, table, rank, port, theirs):
        for connection in self.connections:
            connection.close()
        _serve_rank(table, rank, self.size, port, self.number, theirs, self.folder)

    def run(self, index, house, limit):
        """The outcome of one situation; ranks that hang are asked for their stacks."""
        self.used = True
        begun = time.monotonic()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send((index, house))
        deadline = begun + limit
        outcomes = {}
        while len(outcomes) < self.size and (left := deadline - time.monotonic()) > 0:
            waiting = {c: r for r, c in enumerate(self.connections) if r not in outcomes}
            for connection in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting[connection]
                outcomes[rank] = self._answer(rank)
                if outcomes[rank].kind not in ("done", "absent"):
                    soon = time.monotonic() + SECONDS_AFTER_FIRST_FAILURE
                    deadline = min(deadline, soon)
        hanging = [rank for rank in range(self.size) if rank not in outcomes]
        for rank in hanging:
            os.kill(self.pids[rank], signal.SIGUSR1)
        if hanging:
            time.sleep(SECONDS_FOR_STACKS)
        for rank in hanging:
            stacks = (self.folder / f"stacks-{self.number}-{rank}").read_text(errors="replace")
            outcomes[rank] = RankOutcome("hangs", text=f"rank {rank} hangs\n{stacks}")
        in_order = [outcomes[rank] for rank in range(self.size)]
        return Outcome(in_order, time.monotonic() - begun)

    def _answer(self, rank):
        try:
            _, data = self.connections[rank].recv()
        except (EOFError, OSError):
            log = self.folder / f"output-{self.number}-{rank}"
            return RankOutcome("died", text=f"died; {log.read_text(errors='replace')[-1500:]}")
        return unpickled(data)

    def end(self, patience=0.0):
        """Close the pipes and end the processes."""
        for connection in self.connections:
            connection.close()
        deadline = time.monotonic() + patience
        for pid in self.pids:
            while time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0):
                time.sleep(0.005)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


class Runner:
    """All situations of a table for some numbers of ranks, one after the other."""

    def __init__(self, table):
        self.table = table

    def run(self, size, houses, names):
        """Yields (row, house, outcome) of the situations that are named."""
        folder = Path(tempfile.mkdtemp(prefix="bagua-situations-"))
        ours, theirs = os.pipe()
        store = fork(_serve_store, theirs)
        os.close(theirs)
        port = int(os.read(ours, 16))
        os.close(ours)
        ranks, number = None, 0
        try:
            for index, row in enumerate(self.table):
                if row.name not in names:
                    continue
                for house in houses:
                    if ranks is not None and row.alone and ranks.used:
                        ranks.end()
                        ranks = None
                    if ranks is None:
                        ranks, number = Ranks(self.table, size, port, number, folder), number + 1
                    outcome = ranks.run(index, house, row.limit)
                    whole = all(rank.kind in ("done", "absent") for rank in outcome.ranks)
                    if not whole or row.alone:
                        ranks.end()
                        ranks = None
                    yield row, house, outcome
        finally:
            if ranks is not None:
                ranks.end()
            os.kill(store, signal.SIGKILL)
            os.waitpid(store, 0)
            shutil.rmtree(folder, ignore_errors=True)


def prepare():
    """Import what ranks would import for seconds, and have them share this process's memory."""
    import torch.func
    import torch.utils.checkpoint

    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        kind([weight], lr=0.1).step()
    torch.amp.GradScaler("cpu")
    gc.collect()
    gc.freeze()
