"""AllReduceAggregationHVD in scripts: under torchrun, horovodrun, alone; and without Horovod."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlbench_core.aggregation.pytorch.centralized import AllReduceAggregationHVD
from support.processes import fork_server
from support.processes.fork_server import FORKED_PYTHON
from support.training import error_of

SIZE = 2
BIN = Path(sys.executable).parent

SCRIPT = """
import os, sys, torch
from mlbench_core.aggregation.pytorch.centralized import AllReduceAggregationHVD
{before}
aggregation = AllReduceAggregationHVD({size})
import horovod.torch as hvd
model = torch.nn.Linear(2, 1, bias=False)
model.weight.data.fill_(hvd.rank() + 1.0)
aggregation.agg_model()(model, "sum")
aggregation.agg_model(by_layer=True)(model, "avg_world")
# In one piece: both processes write to one terminal.
os.write(1, f"weight {{model.weight.tolist()}} of {{hvd.size()}}\\n".encode())
{after}
"""
RESULT = "weight [[3.0, 3.0]] of 2"
RUNS = int(os.environ.get("BAGUA_TEST_EXITS", "2"))


def script(size=SIZE, before="", after=""):
    return SCRIPT.format(size=size, before=before, after=after)


def launch(tmp_path, command, source):
    """Run a script under a launcher; what it printed."""
    path = tmp_path / "script.py"
    path.write_text(source)
    env = os.environ | fork_server.variables() | {"OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{BIN}:{env['PATH']}"
    end = subprocess.run(
        [*command, str(path)], env=env, capture_output=True, text=True, timeout=100
    )
    assert end.returncode == 0, end.stdout + end.stderr
    for sign in ("terminate called", "Fatal Python error", "Traceback"):
        assert sign not in end.stderr, end.stderr
    return end.stdout


TORCHRUN = [FORKED_PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
HOROVODRUN = [str(BIN / "horovodrun"), "-np", "2", "--gloo", "-H", "localhost:2", FORKED_PYTHON]
TORCH_GROUP = "torch.distributed.init_process_group('gloo')"


@pytest.mark.timeout(30 * RUNS)
def test_under_torchrun_it_needs_no_other_launcher_and_ends_cleanly_every_time(tmp_path):
    for run in range(RUNS):
        before = ("", TORCH_GROUP)[run % 2]
        assert launch(tmp_path, TORCHRUN, script(before=before)).count(RESULT) == SIZE


# Rank 0 starts Horovod itself, rank 1 leaves that to the class.
ONE_STARTS_IT = """
import horovod.torch as hvd
if os.environ["HOROVOD_RANK"] == "0":
    hvd.init()
"""


def test_under_horovodrun_it_needs_no_torchrun(tmp_path):
    assert launch(tmp_path, HOROVODRUN, script(before=ONE_STARTS_IT)).count(RESULT) == SIZE


def test_without_a_launcher_it_is_alone_and_imports_horovod_when_used(tmp_path):
    alone = script(size=1, before="assert 'horovod' not in sys.modules")
    assert "weight [[1.0, 1.0]] of 1" in launch(tmp_path, [sys.executable], alone)


LOST = """
if hvd.rank() == 1:
    sys.exit(0)
model.weight.data.fill_(7.0)
try:
    aggregation.agg_model()(model, "sum")
except hvd.HorovodInternalError as error:
    assert model.weight.tolist() == [[7.0, 7.0]]
    sys.exit(3)
"""


def test_a_rank_that_left_is_an_error_on_the_other_and_changes_nothing(run_script):
    ends = run_script(SIZE, script(after=LOST), timeout=60.0)
    assert [end.returncode for end in ends] == [3, 0], [end.stderr for end in ends]


# Where it is missing.


@pytest.mark.parametrize("state", ["missing", "built for another torch"])
def test_without_horovod_the_error_says_how_to_get_it(monkeypatch, state):
    fake = None if state == "missing" else type(sys)("horovod.torch")
    monkeypatch.setitem(sys.modules, "horovod.torch", fake)
    message = error_of(lambda: AllReduceAggregationHVD(1), ImportError)
    assert "needs Horovod" in message
    assert "make horovod" in message
