"""Jobs of ranks that are forked from this process, which has imported torch and has no threads.

A job takes seconds of waiting and little work, so several are run at once, by one loop that looks
at all of them. Nothing here blocks.
"""

import ctypes
import gc
import os
import shutil
import signal
import tempfile
import time
import traceback
from pathlib import Path

import torch

PR_SET_PDEATHSIG = 1
SECONDS_FOR_STACKS = 1.0
# torch's stores look up the name of every client; without a name server that answers, each look-up
# may stop them for five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def fork(function, *args):
    """The pid of a process that runs `function(*args)`, returns its result as exit status, and ends
    as Python does when a script is over; with this process at the latest.
    """
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        status = function(*args)
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001 - as at the end of a script
        traceback.print_exc()
    ctypes.pythonapi.Py_Exit(status)  # not past the frames of the parent, which are not ours
    raise AssertionError("unreachable")


class ForkedJob:
    """The ranks of one job. `start`, then `poll` until it is true; `abandon` it before that.

    Attributes:
        folder: for what ranks leave; a subclass removes it.
        pids, statuses: by rank; a status is there once the rank has ended.
    """

    def start_ranks(self, size, function):
        """Forks ranks that call `function(rank)`."""
        self.begun = time.monotonic()
        self.statuses = {}
        self.pids = {rank: fork(function, rank) for rank in range(size)}

    def make_folder(self, prefix):
        # No TemporaryDirectory: every process forked from this one would remove it at its end.
        self.folder = Path(tempfile.mkdtemp(prefix=prefix))

    def look(self):
        """Whether all ranks have ended."""
        for rank in self.left():
            ended, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if ended:
                self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return not self.left()

    def left(self):
        return [rank for rank in self.pids if rank not in self.statuses]

    def kill(self):
        """Ends the ranks that are left, after they have written their stacks; these ranks."""
        left = self.left()
        for rank in left:
            os.kill(self.pids[rank], signal.SIGCONT)
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(SECONDS_FOR_STACKS)
        for rank in left:
            os.kill(self.pids[rank], signal.SIGKILL)
            self.statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1])
        return left

    def abandon(self):
        for rank in self.left():
            os.kill(self.pids[rank], signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def run(jobs, at_once):
    """Starts the jobs in turn, so many at a time; yields each when it has ended."""
    # The first optimizer of a process imports for seconds; it is done here once, for all ranks.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    gc.collect()
    gc.freeze()  # or every rank would copy this process's memory to collect it
    waiting, active = list(reversed(jobs)), []
    try:
        while waiting or active:
            while waiting and len(active) < at_once:
                active.append(waiting.pop())
                active[-1].start()
            for job in [job for job in active if job.poll()]:
                active.remove(job)
                yield job
            time.sleep(0.01)
    finally:
        for job in active:
            job.abandon()
