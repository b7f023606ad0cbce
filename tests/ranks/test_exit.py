"""Scripts that just end: the exit status is what the script says, every time."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

TRAINING = """
import datetime, sys, threading, time
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm

{before}
bagua.init_process_group()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
model = model.with_bagua([], {algorithm})
for step in range(5):
    model.zero_grad()
    model(torch.randn(4, 64)).sum().backward()
print("trained", model.bagua_stats()["rounds"])
{after}
"""

BYTEGRAD = "ByteGradAlgorithm(hierarchical=False)"


def script(before="", after="", algorithm="GradientAllReduceAlgorithm()"):
    return TRAINING.format(before=before, after=after, algorithm=algorithm)


def assert_ends(ends, code, words="", trained="trained 5"):
    for rank, end in enumerate(ends):
        shown = f"rank {rank} ended with {end.returncode}:\n{end.stdout}{end.stderr}"
        assert end.returncode == code, shown
        assert trained in end.stdout, shown
        assert words in end.stderr, shown
        for sign in ("terminate called", "Fatal Python error", "core dumped", "Aborted"):
            assert sign not in end.stderr, shown


# Of the plain case; `make soak` asks for 50.
RUNS = int(os.environ.get("BAGUA_TEST_EXITS", "2"))


@pytest.mark.timeout(100 + 24 * RUNS)  # a run may take as long as it is allowed to
def test_a_script_that_just_ends_exits_with_zero_every_time(run_script):
    algorithms = ["GradientAllReduceAlgorithm()", BYTEGRAD]

    def run(i):
        return run_script(
            2, script(algorithm=algorithms[i % 2]), timeout=100.0, anew=(i + i // 2) % 2
        )

    with ThreadPoolExecutor(2) as pairs:
        for ends in pairs.map(run, range(RUNS)):
            assert_ends(ends, 0)


OWN_GROUP = """
import torch.distributed
torch.distributed.init_process_group("gloo")
"""

# A thread of the board reports a wait when the script ends, and comes back from there, and reports
# again, while the interpreter ends, which takes a while.
REPORT_AT_THE_END = """
import time
from bagua import _C

told = threading.Event()

def report(text):
    told.set()
    time.sleep(0.5)

board = _C.Board(torch.distributed.HashStore(), 0, 2, straggler_after_s=0.05, on_straggler=report)
seat = board.seat("phase", [0, 1])
seat.beat(1, "a wait", True, on_news=report, on_never=report)
assert told.wait(60)

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)
torch.slow = Slow()  # goes with the modules
"""

ENDINGS = {
    "report-at-the-end": (script(after=REPORT_AT_THE_END), 0, ""),
    "own-torch-group": (script(before=OWN_GROUP), 0, ""),
    "destroyed-by-hand": (script(after="bagua.destroy_process_group()"), 0, ""),
    "own-torch-group-destroyed-first": (
        script(before=OWN_GROUP, after="torch.distributed.destroy_process_group()"),
        0,
        "",
    ),
    "exception": (script(after="raise KeyError('of the user')"), 1, "KeyError: 'of the user'"),
    "forward-without-backward": (script(after="loss = model(torch.randn(4, 64)).sum()"), 0, ""),
    "unfinished-round": (
        script(
            before="""
class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("in backward")
""",
            after="""
y = model(Stop.apply(torch.randn(4, 64, requires_grad=True)))
try:
    y.sum().backward()
except ZeroDivisionError:
    print("unfinished")
# The first rank that exits would end the round of the other one, in its backward.
store = torch.distributed.distributed_c10d._get_default_store()
store.add("unfinished", 1)
while store.add("unfinished", 0) < 2:
    time.sleep(0.01)
""",
        ),
        0,
        "",
    ),
    "global-references": (
        script(after="keep = [model, model.bagua_ddp, bagua.communication.get_default_group()]"),
        0,
        "",
    ),
    "model-deleted": (script(after="import gc; del model; gc.collect()"), 0, ""),
    "from-a-thread": (
        script(
            after="""
def train():
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
        ),
        0,
        "",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_exits_with_its_own_status(run_script, ending):
    source, code, words = ENDINGS[ending]
    assert_ends(run_script(2, source, timeout=60.0), code, words)


LATE_DROPS = """
import atexit, time, weakref

class Argument:
    pass

def drops():
    argument = Argument()
    reference = weakref.ref(argument)
    _C.interruptible(lambda argument: None, argument)
    del argument
    deadline = time.monotonic() + seconds
    while reference() and time.monotonic() < deadline:
        time.sleep(0.01)
    print("kept" if reference() else "dropped")

atexit.register(drops)  # runs after what is registered later
import bagua.torch_api
from bagua import _C
seconds = 30.0
drops()
seconds = 1.0
"""


def test_threads_drop_nothing_once_the_interpreter_ends(run_script):
    (end,) = run_script(1, LATE_DROPS)
    assert end.stdout == "dropped\nkept\n", end.stderr
