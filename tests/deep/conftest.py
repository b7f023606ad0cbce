"""Long tests and suites of others, which `make test-deep` runs and `make test` does not."""

import functools

import pytest
from support.processes import pool

SECONDS = 110


@pytest.fixture(scope="session")
def ranks():
    """As that of tests/integrations: the called function makes the process group itself."""
    with pool.Pool() as processes:
        yield functools.partial(processes, timeout=SECONDS, init=False)
