"""Fixtures of the tests in one process."""

import pytest
from bagua import _C


@pytest.fixture(scope="session")
def _fake_nccl():
    if not _C.has_nccl:
        pytest.skip("this build has no nccl.h")
    from support.programs.fake_nccl import FakeNccl

    return FakeNccl()


@pytest.fixture
def nccl(_fake_nccl):
    """The fake NCCL without faults; what a test leaves over or does wrong with it fails it."""
    _fake_nccl.reset()
    before = _fake_nccl.alive()
    yield _fake_nccl
    assert _fake_nccl.misuse().decode() == ""
    assert _fake_nccl.alive() == before, "communicators are left over"
