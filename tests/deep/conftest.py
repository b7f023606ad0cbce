"""Long tests and suites of others, which `make test-deep` runs and `make test` does not."""

from ranks.conftest import ranks, run_script  # noqa: F401 - pytest finds fixtures by name
