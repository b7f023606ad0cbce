"""Runs torch's tests of DistributedDataParallel, each on ranks forked from this process.

    cd tests && python -m deep.torch_suite.run [--ddp torch] [--jobs N] [--output] [NAME ...]

puts our class in place of torch's (or leaves torch's) and prints a line of JSON for each test as it
ends: its name, what became of it, the seconds it took, and what the ranks said.
"""

import argparse
import ctypes
import faulthandler
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

import bagua.torch_api.data_parallel
import torch
import torch.distributed as dist
from deep.torch_suite.expectations import OVER_GLOO, TESTS
from deep.torch_suite.without_cuda import RANKS, cuda_calls_are_nothing, put_in_place, suite
from torch.testing._internal import common_utils

# torch's stores look up the name of every client; without a name server that answers, each look-up
# may stop them for five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

CLASSES = {
    "torch": torch.nn.parallel.DistributedDataParallel,
    "bagua": bagua.torch_api.data_parallel.DistributedDataParallel,
}
#: Seconds until a test that has not ended counts as hanging, and until the other ranks of one that
#: has failed are ended.
LIMIT = 120.0
PATIENCE = 3.0
SECONDS_FOR_STACKS = 0.5
PR_SET_PDEATHSIG = 1
#: They begin first, or the others would end before them.
SLOWEST = ("test_ddp_apply_optim_in_backward",)


class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """As in torch's own test_distributed_spawn.py."""


def run_rank(name, rank, folder, ddp):
    """Never returns. What became of the test lies in the folder."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(folder / f"output-{rank}", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2)
    suite.INIT_METHOD = f"file://{folder}/init"
    os.environ.update(TEMP_DIR=str(folder), INIT_METHOD=suite.INIT_METHOD)
    torch.set_num_threads(1)
    put_in_place(ddp)
    outcome, text = "passed", ""
    try:
        _run_test(name, rank, folder)
    except unittest.SkipTest as reason:
        outcome, text = "skipped", str(reason)
    except SystemExit as end:
        outcome, text = "skipped", f"exit status {end.code}"
    except BaseException as error:  # noqa: BLE001 - told to the parent
        traceback.print_exc()
        outcome, text = "failed", f"{type(error).__name__}: {error}"
    (folder / f"new-{rank}").write_text(json.dumps([outcome, text.split("\n\nTo execute this")[0]]))
    (folder / f"new-{rank}").rename(folder / f"outcome-{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run_test(name, rank, folder):
    if name in OVER_GLOO:
        os.environ["BAGUA_COMM"] = "gloo"
    test = Tests(name)
    test.rank, test.file_name = rank, str(folder / "group")
    dist.init_process_group(
        "gloo",
        init_method=test.init_method,
        world_size=RANKS,
        rank=rank,
        timeout=timedelta(seconds=LIMIT),
    )
    test._barrier()
    common_utils.set_rng_seed()
    with cuda_calls_are_nothing(name):
        getattr(test, name)()
    test._barrier()
    dist.destroy_process_group()


class Job:
    """One test at work. `poll` until it is true, then `result`."""

    def __init__(self, name, ddp):
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="torch-suite-"))
        for inner in ("barrier", "test_dir"):
            (self.folder / inner).mkdir()
        self.begun = time.monotonic()
        self.failed = None
        self.pids, self.ends = {}, {}
        for rank in range(RANKS):
            self.pids[rank] = os.fork()
            if not self.pids[rank]:
                try:
                    run_rank(name, rank, self.folder, ddp)
                finally:
                    os._exit(1)

    def poll(self):
        """Whether all ranks have ended."""
        now = time.monotonic()
        for rank, pid in self.pids.items():
            if rank not in self.ends:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.ends[rank] = f"ended with {os.waitstatus_to_exitcode(status)}"
                    if self._outcome(rank)[0] != "passed":
                        self.failed = self.failed or now
        late = self.failed is not None and now > self.failed + PATIENCE
        if len(self.ends) < len(self.pids) and (late or now > self.begun + LIMIT):
            self.kill("waited for the others" if late else f"hangs after {LIMIT:.0f} seconds")
        return len(self.ends) == len(self.pids)

    def kill(self, reason):
        """Ends the ranks that are left."""
        left = {rank: pid for rank, pid in self.pids.items() if rank not in self.ends}
        for pid in left.values():
            os.kill(pid, signal.SIGUSR1)
        time.sleep(SECONDS_FOR_STACKS)
        for rank, pid in left.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.ends[rank] = reason

    def _outcome(self, rank):
        path = self.folder / f"outcome-{rank}"
        return json.loads(path.read_text()) if path.exists() else ["failed", self.ends[rank]]

    def result(self, with_output):
        """What is printed; the folder is gone afterwards."""
        outcomes = [self._outcome(rank) for rank in self.pids]
        kinds = {kind for kind, _ in outcomes}
        result = {
            "name": self.name,
            "outcome": kinds.pop() if len(kinds) == 1 else "failed",
            "seconds": round(time.monotonic() - self.begun, 1),
            "ranks": [text for _, text in outcomes],
        }
        if with_output:
            outputs = [(self.folder / f"output-{rank}").read_text() for rank in self.pids]
            result["output"] = outputs
        shutil.rmtree(self.folder)
        return result


def run(names, ddp, jobs):
    """Yields the job of each test, as they end."""
    # The first optimizer of a process imports for seconds; it is done here once, for all ranks.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    gc.collect()
    gc.freeze()  # or every rank would copy this process's memory to collect it
    waiting, active = sorted(reversed(names), key=SLOWEST.__contains__), []
    try:
        while waiting or active:
            while waiting and len(active) < jobs:
                active.append(Job(waiting.pop(), ddp))
            for job in [job for job in active if job.poll()]:
                active.remove(job)
                yield job
            time.sleep(0.01)
    finally:
        for job in active:
            job.kill("stopped")
            shutil.rmtree(job.folder)


def main():
    """Runs the tests that are named, or all that torch's class passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=TESTS)
    parser.add_argument("--ddp", choices=CLASSES, default="bagua")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--output", action="store_true")
    chosen = parser.parse_args()
    for job in run(chosen.names, CLASSES[chosen.ddp], chosen.jobs):
        print(json.dumps(job.result(chosen.output)), flush=True)


if __name__ == "__main__":
    main()
