"""The fixtures of tests that need real ranks: processes, which share memory unless told."""

import pytest
from support.processes import pool


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n, function, *args)` runs a module-level function on n processes: see `Pool`."""
    with pool.Pool() as processes:
        yield processes


@pytest.fixture(scope="session")
def run_script():
    """`run_script(n, source)` starts a script as torchrun would, n times: see `pool.run_script`."""
    return pool.run_script
