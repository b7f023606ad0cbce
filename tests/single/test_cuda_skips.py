"""What becomes of tests that need CUDA where there is none: skipped, or failed if asked for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def outcomes():
    """What pytest says about the tests of graphs, without and with FAIL_WITHOUT_CUDA=1."""

    def run(fail):
        # An empty list of devices: a GPU that is there is not seen.
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "FAIL_WITHOUT_CUDA": fail}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsf"]
        return subprocess.run(
            [*command, "tests/cuda/test_graphs.py"],
            cwd=REPOSITORY,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

    return [run("0"), run("1")]


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
