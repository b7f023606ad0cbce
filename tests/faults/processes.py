"""Ranks that are processes: forked from this one, which has imported torch and has no threads.

A case takes seconds of waiting and little work, so several are run at once, by one loop that looks
at all of them. Nothing here blocks.
"""

import ctypes
import gc
import json
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from faults import training_rank
from faults.cases import TIMEOUT
from faults.verdict import RankOutcome

#: Seconds until a rank that has not ended counts as hanging: after the fault, and in all.
PATIENCE = 4 * TIMEOUT + 20.0  # gloo tries to connect three times
LIMIT = 120.0
SECONDS_FOR_STACKS = 1.0
# torch's stores look up the name of every client; without a name server that answers, each look-up
# may stop them for five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def fork(function, *args):
    """The pid of a process that runs `function(*args)`, returns its result as exit status, and ends
    as Python does when a script is over.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = function(*args)
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001 - as at the end of a script
        traceback.print_exc()
    ctypes.pythonapi.Py_Exit(status)  # not past the frames of the parent, which are not ours
    raise AssertionError("unreachable")


def _serve_store(pipe):
    ctypes.CDLL(None).prctl(training_rank.PR_SET_PDEATHSIG, signal.SIGKILL)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(pipe, str(store.port).encode())
    while True:
        time.sleep(60)


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Job:
    """One case at work. `start`, then `poll` until it is true, then `outcomes`."""

    def __init__(self, case):
        self.case = case
        # No TemporaryDirectory: every process forked from this one would remove it at its end.
        self.folder = Path(tempfile.mkdtemp(prefix="bagua-fault-"))
        self.pids = {}
        self.statuses = {}
        self.hanging = set()
        self._store = None
        self._struck = None
        self._stopped = None

    def start(self):
        port = self._start_store() if self.case.store == "agent" else _free_port()
        self.begun = time.monotonic()
        for rank in range(self.case.ranks):
            self.pids[rank] = fork(training_rank.main, self.case, rank, port, self.folder)

    def _start_store(self):
        ours, theirs = os.pipe()
        self._store = fork(_serve_store, theirs)
        os.close(theirs)
        port = int(os.read(ours, 16))
        os.close(ours)
        return port

    def poll(self):
        """Whether all ranks have ended."""
        for rank, pid in self.pids.items():
            if rank not in self.statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
        self._assist()
        if len(self.statuses) == len(self.pids):
            return True
        now = time.monotonic()
        late = self._struck is not None and now > self._struck + PATIENCE
        if late or now > self.begun + LIMIT:
            self._kill_hanging()
            return True
        return False

    def _assist(self):
        """What a rank cannot do itself: go on when it is stopped, hear that the others have ended,
        kill the store.
        """
        now = time.monotonic()
        if self._struck is None and self._events(self.case.victim, "fault"):
            self._struck = now
        others = [rank for rank in self.pids if rank != self.case.victim]
        over = all(rank in self.statuses for rank in others)
        if over and not (self.folder / "over").exists():
            (self.folder / "over").touch()
        if self._stopped is None and (self.folder / "stopped").exists():
            self._stopped = now
        if self._stopped and self.case.victim not in self.statuses:
            pause = self.case.fault == "pause" and now > self._stopped + self.case.seconds
            if pause or over:
                os.kill(self.pids[self.case.victim], signal.SIGCONT)
        if (self.folder / "kill store").exists():
            self._end_store()
            (self.folder / "kill store").unlink()
        if (self.folder / "stop store").exists():
            os.kill(self._store, signal.SIGSTOP)
            (self.folder / "stop store").unlink()

    def _end_store(self):
        if self._store is not None:
            os.kill(self._store, signal.SIGKILL)
            os.waitpid(self._store, 0)
            self._store = None

    def _kill_hanging(self):
        self.hanging = {rank for rank in self.pids if rank not in self.statuses}
        for rank in self.hanging:
            os.kill(self.pids[rank], signal.SIGCONT)
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(SECONDS_FOR_STACKS)
        for rank in self.hanging:
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)

    def _events(self, rank, kind):
        path = self.folder / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if kind in event]

    def outcomes(self):
        """What each rank did; the folder is gone afterwards."""
        results = [self._outcome(rank) for rank in range(self.case.ranks)]
        self._end_store()
        shutil.rmtree(self.folder)
        return results

    def _outcome(self, rank):
        output = self.folder / f"output-{rank}"
        outcome = RankOutcome(
            steps={e["step"]: (e["bits"], e["finite"]) for e in self._events(rank, "bits")},
            done=bool(self._events(rank, "done")),
            hangs=rank in self.hanging,
            struck=bool(self._events(rank, "fault")),
            output=output.read_text(errors="replace") if output.exists() else "",
        )
        for event in self._events(rank, "error"):
            outcome.error, outcome.text = event["error"], event["text"]
        if rank not in self.hanging:
            status, allowed = self.statuses[rank], self._allowed(rank, outcome)
            if status not in allowed:
                outcome.crash = f"ended with {status}, not {sorted(allowed)}"
        return outcome

    def _allowed(self, rank, outcome):
        if rank == self.case.victim and outcome.struck:
            own = {"exit": 3, "raise": 1, "no memory": 1, "leave": 0}
            own |= dict.fromkeys(("kill", "kill with a helper"), -signal.SIGKILL)
            if self.case.fault in own:
                return {own[self.case.fault]}
            if self.case.fault == "interrupt":  # it may come when the training is over
                return {0, 1} if outcome.done else {1}
        return {training_rank.EXIT_OF_AN_ERROR} if outcome.error else {0}

    def seconds_until_over(self):
        """From the fault to the end of the last rank, or None where none came."""
        return None if self._struck is None else time.monotonic() - self._struck


def run(cases, at_once=4):
    """Yields (case, outcomes, seconds from the fault to the end) of each, as they end."""
    # The first optimizer of a process imports for seconds; it is done here once, for all ranks.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    gc.collect()
    gc.freeze()  # or every rank would copy this process's memory to collect it
    waiting, active = list(reversed(cases)), []
    try:
        while waiting or active:
            while waiting and len(active) < at_once:
                job = Job(waiting.pop())
                active.append(job)
                job.start()
            for job in [job for job in active if job.poll()]:
                active.remove(job)
                seconds = job.seconds_until_over()
                yield job.case, job.outcomes(), seconds
            time.sleep(0.01)
    finally:
        for job in active:
            for rank, pid in job.pids.items():
                if rank not in job.statuses:
                    os.kill(pid, signal.SIGKILL)
            job._end_store()
            shutil.rmtree(job.folder, ignore_errors=True)
