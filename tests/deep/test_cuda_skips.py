"""Tests that need CUDA are skipped without it, or fail on request."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run_without_gpu(python_arguments, fail):
    """pytest on the tests of graphs, where no GPU is seen: the list of devices is empty."""
    command = [sys.executable, *python_arguments, "pytest", "-p", "no:cacheprovider", "-rsf"]
    return subprocess.run(
        [*command, "tests/cuda/test_graphs.py"],
        cwd=REPOSITORY,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "FAIL_WITHOUT_CUDA": fail},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def outcomes():
    """What pytest says about the tests of graphs, without and with FAIL_WITHOUT_CUDA=1."""

    return [run_without_gpu(["-m"], fail) for fail in ("0", "1")]


def count(outcome, kind):
    found = re.search(rf"(\d+) {kind}", outcome.stdout.splitlines()[-1])
    return int(found[1]) if found else 0


def test_they_are_skipped_with_the_reason(outcomes):
    skipped = outcomes[0]
    assert skipped.returncode == 0, skipped.stdout
    assert count(skipped, "skipped") > 0
    assert "no CUDA device (torch " in skipped.stdout


def test_fail_without_cuda_makes_each_of_them_a_failure_with_the_reason(outcomes):
    skipped, failed = outcomes
    assert failed.returncode == 1
    assert count(failed, "skipped") == 0
    wanted = count(skipped, "skipped")
    assert count(failed, "failed") + count(failed, "error") == wanted, failed.stdout
    assert "needs CUDA: no CUDA device (torch " in failed.stdout


def test_the_others_run_in_both_cases(outcomes):
    assert count(outcomes[0], "passed") == count(outcomes[1], "passed") > 0


def test_under_torchrun_rank_zero_runs_the_tests_and_the_others_skip_them(outcomes):
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", "-m"]
    together = run_without_gpu(torchrun, "0")
    assert together.returncode == 0, together.stdout + together.stderr
    # The reports of two processes may share a line.
    assert re.findall(r"(\d+) passed", together.stdout) == [str(count(outcomes[0], "passed"))]
    assert len(re.findall(r"(\d+) skipped", together.stdout)) == 2
    assert "rank 0 runs the tests, this is rank 1" in together.stdout
