"""The fixtures of tests on GPUs. What becomes of them without one: tests/conftest.py."""

from ranks.conftest import ranks  # noqa: F401 - pytest finds fixtures by name
