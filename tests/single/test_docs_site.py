"""The documentation site: `make docs` finds dead links, these tests what it cannot."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from bagua.torch_api.algorithms import GlobalAlgorithmRegistry
from support.programs.benchmark_programs import load_file

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def hooks():
    return load_file(REPOSITORY / "tools/docs/links.py")


def rewritten(hooks, markdown, page="integrations/fsdp.md"):
    files = SimpleNamespace(
        documentation_pages=lambda: [SimpleNamespace(src_uri="cuda.md")],
        media_files=lambda: [SimpleNamespace(src_uri="demo.png")],
    )
    config = SimpleNamespace(config_file_path=str(REPOSITORY / "mkdocs.yml"))
    page = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    return hooks.on_page_markdown(markdown, page, config, files)


def test_links_to_files_that_are_no_pages_become_text_or_links_into_the_repository(
    hooks, monkeypatch
):
    monkeypatch.delenv("BAGUA_PROJECT_URL", raising=False)
    text = "[a](../cuda.md#x) [b](../../csrc/engine/engine.h) [c](../examples/digits.py) [d](e.md)"
    assert rewritten(hooks, text) == "[a](../cuda.md#x) b c [d](e.md)"
    monkeypatch.setenv("BAGUA_PROJECT_URL", "https://x.org/")
    linked = "[b](https://x.org/csrc/engine/engine.h) [c](https://x.org/docs/examples/digits.py)"
    assert rewritten(hooks, text) == f"[a](../cuda.md#x) {linked} [d](e.md)"


def test_roles_leave_the_name(hooks):
    html = "of :meth:<code>x</code> and :class: <code>y</code>, not :meth:z"
    assert hooks.on_page_content(html) == "of <code>x</code> and  <code>y</code>, not :meth:z"


def test_every_algorithm_is_in_the_reference_and_in_the_table_of_choices():
    pages = [(REPOSITORY / "docs" / name).read_text() for name in ("api.md", "index.md")]
    classes = set(re.findall(r"`(\w+Algorithm)`", (REPOSITORY / "README.md").read_text()))
    registered = GlobalAlgorithmRegistry.values()
    assert classes == {entry["algorithm"].__name__ for entry in registered}
    for name in classes:
        assert all(name in page for page in pages), name
