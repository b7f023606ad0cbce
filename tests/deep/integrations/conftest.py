"""The ranks of tests/integrations, which import the packages."""

from integrations.conftest import ranks  # noqa: F401 - pytest finds fixtures by name
