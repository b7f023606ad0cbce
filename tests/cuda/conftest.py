"""The fixtures of tests on GPUs, and how torchrun runs them. Without a GPU: tests/conftest.py.

Tests that need several ranks start them, on all GPUs that there are. So under torchrun the process
with rank 0 runs the tests, as if it had been started alone, and the others skip theirs.
"""

import os

import pytest
from ranks.conftest import ranks  # noqa: F401 - pytest finds fixtures by name
from support.processes.pool import torchrun_environment

RANK = int(os.environ.get("RANK", 0))
# What torchrun said about its own group is not about those that the tests start.
for name in torchrun_environment(0, 1, 0):
    if name not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        os.environ.pop(name, None)


def pytest_collection_modifyitems(items):
    """Skips what another process of torchrun's runs, in whatever folder of tests it is."""
    if RANK == 0:
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason=f"rank 0 runs the tests, this is rank {RANK}"))
