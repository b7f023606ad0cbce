"""Tests with Lightning, Accelerate, transformers and others: see requirements-integrations.txt.

Only the ranks import those packages: they take seconds.
"""

import functools

import pytest
from support.processes import pool

SECONDS = 110  # the first call imports the packages, on a machine that does other work too


@pytest.fixture(scope="session")
def ranks():
    """As that of tests/ranks, for packages that make the process group themselves."""
    with pool.Pool() as processes:
        yield functools.partial(processes, timeout=SECONDS, init=False)
