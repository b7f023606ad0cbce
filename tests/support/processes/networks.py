"""Shaped networks of benchmarks/network.py, for tests that need root's namespaces."""

import pytest
from support.programs.benchmark_programs import load

__all__ = ["needs_namespaces", "network"]

network = load("network")
_missing = network.why_unavailable()
needs_namespaces = pytest.mark.skipif(
    _missing is not None, reason=f"no network namespaces: {_missing}"
)
