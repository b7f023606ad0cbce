"""The watchdog of NcclCommunicator on a fake CUDA: each case in a separate process."""

import re
from pathlib import Path

import pytest
import torch
from bagua import _C
from support.processes.pool import run_script

PROGRAM = Path(__file__).parents[1] / "support/programs/watchdog_cases.py"
#: Its functions whose names are sentences.
CASES = re.findall(r"^def (\w+_\w+_\w+_\w+)\(\):", PROGRAM.read_text(), re.M)


@pytest.mark.skipif(not _C.has_nccl, reason="this build has no nccl.h")
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
@pytest.mark.parametrize("case", CASES)
def test_on_a_fake_device(case):
    (done,) = run_script(1, PROGRAM, [case], timeout=110)
    assert done.returncode == 0, done.stderr
