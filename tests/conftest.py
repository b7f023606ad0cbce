"""Makes the folders of tests/ importable, and says what becomes of tests that need a GPU."""

import os
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)


def pytest_runtest_setup(item):
    """Without CUDA a test marked needs_cuda is skipped; with FAIL_WITHOUT_CUDA=1 it fails."""
    if item.get_closest_marker("needs_cuda") is None:
        return
    from single.devices import missing_for_cuda

    reason = missing_for_cuda()
    if reason and os.environ.get("FAIL_WITHOUT_CUDA") == "1":
        pytest.fail(f"needs CUDA: {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)
