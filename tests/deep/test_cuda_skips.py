"""Tests that need CUDA are skipped without it, or fail on request."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run_without_gpu(*python_arguments, fail="0"):
    """What pytest says about the tests of graphs, where the list of devices is empty."""
    command = [sys.executable, *python_arguments, "-m", "pytest", "-p", "no:cacheprovider", "-rsf"]
    return subprocess.run(
        [*command, "tests/cuda/test_graphs.py"],
        cwd=REPOSITORY,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "FAIL_WITHOUT_CUDA": fail},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def skipped():
    return run_without_gpu()


def count(outcome, kind):
    found = re.search(rf"(\d+) {kind}", outcome.stdout.splitlines()[-1])
    return int(found[1]) if found else 0


def test_they_are_skipped_with_the_reason_or_fail_and_the_others_run(skipped):
    failed = run_without_gpu(fail="1")
    assert (skipped.returncode, failed.returncode) == (0, 1), skipped.stdout
    assert count(skipped, "skipped") == count(failed, "failed") + count(failed, "error") > 0
    assert count(skipped, "passed") == count(failed, "passed") > 0
    assert count(failed, "skipped") == 0
    for outcome in (skipped, failed):
        assert "no CUDA device (torch " in outcome.stdout


def test_under_torchrun_rank_zero_runs_the_tests_and_the_others_skip_them(skipped):
    together = run_without_gpu("-m", "torch.distributed.run", "--nproc_per_node=2")
    assert together.returncode == 0, together.stdout + together.stderr
    # The reports of two processes may share a line.
    assert re.findall(r"(\d+) passed", together.stdout) == [str(count(skipped, "passed"))]
    assert len(re.findall(r"(\d+) skipped", together.stdout)) == 2
    assert "rank 0 runs the tests, this is rank 1" in together.stdout
