"""The documentation site: `make docs` finds dead links, these tests what it cannot."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from bagua.torch_api.algorithms import GlobalAlgorithmRegistry
from support.documented import pages
from support.programs.benchmark_programs import load_file

REPOSITORY = Path(__file__).parents[2]
BESIDE_CODE = ["tests/README.md", "tests/ranks/situations/README.md", "csrc/codec/cuda/README.md"]
MOST_LINES = {"findings.md": 250}  # tables, for those who ask how we know


@pytest.fixture
def hooks():
    return load_file(REPOSITORY / "tools/docs/links.py")


def rewritten(hooks, markdown, page="integrations/fsdp.md"):
    files = SimpleNamespace(
        documentation_pages=lambda: [SimpleNamespace(src_uri="cuda.md")],
        media_files=lambda: [SimpleNamespace(src_uri="pictures/steps.svg")],
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


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ("<p>Example::</p>", "<p>Example:</p>"),
        (
            "of :meth:<code>x</code> and :class: <code>y</code>, not :meth:z",
            "of <code>x</code> and  <code>y</code>, not :meth:z",
        ),
        (
            "<td><code>f(a=1,b)</code></td><p><code>f(a)</code></p>",
            "<td><code>f(<wbr>a=1,<wbr>b)</code></td><p><code>f(a)</code></p>",
        ),
    ],
    ids=["example", "roles", "calls-in-tables-break-behind-brackets"],
)
def test_docstrings_become_html_without_marks(hooks, html, expected):
    assert hooks.on_page_content(html) == expected


def test_every_algorithm_is_in_the_reference_and_in_the_table_of_choices():
    names = ("api.md", "algorithms.md", "which-algorithm.md")
    pages = [(REPOSITORY / "docs" / name).read_text() for name in names]
    registered = GlobalAlgorithmRegistry.items()
    assert len(registered) >= 10
    for name, entry in registered:
        assert all(entry["algorithm"].__name__ in page for page in pages), name
        assert (REPOSITORY / f"docs/algorithms/{name}.md").exists(), name


def links_of(path):
    """(file, anchor) of the links of a page into the project."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        yield (path.parent / name).resolve() if name else path, anchor


def anchors_of(path):
    """Anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    headings = [re.sub(r"[`*]", "", h).strip() for h in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


def test_links_outside_of_the_site_lead_somewhere():
    """mkdocs checks the links between pages; these it does not see."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *BESIDE_CODE):
        for file, anchor in links_of(REPOSITORY / name):
            assert file.exists(), f"{name}: {file}"
            if anchor:
                assert anchor in anchors_of(file), f"{name}: {file.name}#{anchor}"
    for page in (REPOSITORY / "docs").rglob("*.md"):
        for file, anchor in links_of(page):
            assert file.exists(), f"{page}: {file}"
            if anchor and REPOSITORY / "docs" not in file.parents and file.suffix == ".md":
                assert anchor in anchors_of(file), f"{page}: {file.name}#{anchor}"


def test_pages_that_the_code_names_are_there():
    folders = ("python", "csrc", "tests", "tools", "benchmarks", "cmake")
    files = [f for folder in folders for f in (REPOSITORY / folder).rglob("*") if f.is_file()]
    named = set()
    for file in files:
        if file.suffix in {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh", ".cmake", ".pml"}:
            named |= set(re.findall(r"\bdocs/[\w/-]+\.md", file.read_text()))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []


def test_pages_of_the_guide_are_short():
    for page in pages():
        lines = len(page.read_text().splitlines())
        assert lines <= (130 if page.name == "README.md" else MOST_LINES.get(page.name, 150)), page


def test_pictures_have_words_and_are_drawings():
    for page in pages():
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            assert len(words) > 20, f"{page}: {target}"
            assert (page.parent / target).suffix == ".svg"


#: Parts of messages on the troubleshooting page that are torch's.
OF_TORCH = {"The client socket has timed out", "while trying to connect to"}
#: Those that are put together from words, so that a test has the whole text.
PUT_TOGETHER = {
    "ranks differ in the bucket plan",
    "Open MPI's mpirun has started",
    "round behind, in round",
    "call behind, in call",
    "after its allreduce_inplace",
    "is still in round",
    "changed from Float to Half",
    "has failed too, in round",
    "silent for over a second, last in round",
}


def joined(*files):
    """The texts of files, with strings of several lines joined."""
    return re.sub(r'"\s*(?:<<\s*)?[rf]?"', "", "\n".join(path.read_text() for path in files))


def test_the_messages_on_the_troubleshooting_page_are_in_the_sources():
    """Without their names and numbers, or in a test; so are the lines of the example."""
    sources = joined(*REPOSITORY.glob("python/**/*.py"), *REPOSITORY.glob("csrc/**/*.[hc]*"))
    tests = joined(*(path for path in REPOSITORY.glob("tests/**/*.py") if path != Path(__file__)))
    page = (REPOSITORY / "docs/troubleshooting.md").read_text()
    named = re.compile(r"…|: |'[^']*'|\b\d[\w.:]*|\([^)]*\)|[A-Z]\w+_\w+|AdamW|uint8")
    cells = re.findall(r"^\| (.*?) \|", page, re.M)
    quoted = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    example = re.search(r"^``` \{ \.text .*?\n(.*?)^```", page, re.M | re.S).group(1)
    found = set()
    for message in [*quoted, *example.splitlines()]:
        parts = {part.strip(" ,.:;") for part in named.split(message)}
        found |= {part for part in parts if " " in part}
    missing = {part for part in found if part not in sources}
    assert missing == OF_TORCH | PUT_TOGETHER
    assert [part for part in PUT_TOGETHER if part not in tests] == []
