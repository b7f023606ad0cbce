"""Runs torch's tests of DistributedDataParallel, each on ranks forked from this process.

    cd tests && python -m deep.torch_suite.run [--ddp torch] [--jobs N] [--output] [NAME ...]

puts our class in place of torch's (or leaves torch's) and prints a line of JSON for each test as it
ends: its name, what became of it, the seconds it took, and what the ranks said.
"""

import argparse
import faulthandler
import json
import os
import shutil
import signal
import sys
import time
import traceback
import unittest
from datetime import timedelta

import bagua.torch_api.data_parallel
import torch
import torch.distributed as dist
from deep.torch_suite.expectations import OVER_GLOO, TESTS
from deep.torch_suite.without_cuda import RANKS, cuda_calls_are_nothing, put_in_place, suite
from support.processes import forked_jobs
from torch.testing._internal import common_utils

CLASSES = {
    "torch": torch.nn.parallel.DistributedDataParallel,
    "bagua": bagua.torch_api.data_parallel.DistributedDataParallel,
}
#: Seconds until a test that has not ended counts as hanging, and until the other ranks of one that
#: has failed are ended.
LIMIT = 120.0
PATIENCE = 3.0
#: They begin first, or the others would end before them.
SLOWEST = ("test_ddp_apply_optim_in_backward",)


class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """As in torch's own test_distributed_spawn.py."""


def run_rank(name, rank, folder, ddp):
    """Never returns. What became of the test lies in the folder."""
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


class Job(forked_jobs.ForkedJob):
    """One test at work; `result` when it has ended."""

    def __init__(self, name, ddp):
        self.name, self._ddp = name, ddp
        self._failed = None
        self._ends = {}

    def start(self):
        self.make_folder("torch-suite-")
        for inner in ("barrier", "test_dir"):
            (self.folder / inner).mkdir()
        self.start_ranks(RANKS, lambda rank: run_rank(self.name, rank, self.folder, self._ddp))

    def poll(self):
        """Whether all ranks have ended."""
        over, now = self.look(), time.monotonic()
        if self._failed is None and any(self._outcome(r)[0] != "passed" for r in self.statuses):
            self._failed = now
        late = self._failed is not None and now > self._failed + PATIENCE
        if not over and (late or now > self.begun + LIMIT):
            reason = "waited for the others" if late else f"hangs after {LIMIT:.0f} seconds"
            self._ends = dict.fromkeys(self.kill(), reason)
        return not self.left()

    def _outcome(self, rank):
        path = self.folder / f"outcome-{rank}"
        if path.exists():
            return json.loads(path.read_text())
        return ["failed", self._ends.get(rank, f"ended with {self.statuses[rank]}")]

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


def main():
    """Runs the tests that are named, or all that torch's class passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=TESTS)
    parser.add_argument("--ddp", choices=CLASSES, default="bagua")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--output", action="store_true")
    chosen = parser.parse_args()
    names = sorted(chosen.names, key=lambda name: name not in SLOWEST)
    for job in forked_jobs.run([Job(n, CLASSES[chosen.ddp]) for n in names], chosen.jobs):
        print(json.dumps(job.result(chosen.output)), flush=True)


if __name__ == "__main__":
    main()
