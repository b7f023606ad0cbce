"""Metadata that the build makes: the torch that a wheel needs, the README on package indexes."""

import re
from importlib import metadata
from pathlib import Path

import mlbench_core
import pytest
from support.programs.benchmark_programs import load_file

REPOSITORY = Path(__file__).parents[2]


def provider():
    return load_file(REPOSITORY / "tools/metadata/bagua_metadata.py")


@pytest.mark.parametrize("installed", ["2.13.0", "2.13.1+cu130", "2.13.0a0+git1234"])
def test_a_wheel_needs_the_minor_release_of_torch_that_it_was_built_against(installed):
    assert provider().pinned_torch(installed) == "torch==2.13.*"


def test_a_source_distribution_takes_any_torch_that_is_supported():
    assert provider().dynamic_metadata("dependencies", {"pinned": False}) == ["torch>=2.11"]
    (pinned,) = provider().dynamic_metadata("dependencies", {"pinned": True})
    assert re.fullmatch(r"torch==\d+\.\d+\.\*", pinned)
    with pytest.raises(ValueError, match="no provider for the field 'version'"):
        provider().dynamic_metadata("version")


def links_into_the_project(text):
    return [target for target in re.findall(r"\]\(([^)]*)\)", text) if "://" not in target]


def test_the_readme_of_an_index_has_no_dead_links(monkeypatch):
    monkeypatch.delenv("BAGUA_PROJECT_URL", raising=False)
    original = (REPOSITORY / "README.md").read_text()
    assert len(links_into_the_project(original)) > 10
    monkeypatch.chdir(REPOSITORY)
    described = provider().dynamic_metadata("readme")
    assert described["content-type"] == "text/markdown"
    assert links_into_the_project(described["text"]) == []
    assert "Which algorithm? has the other algorithms" in described["text"]
    monkeypatch.setenv("BAGUA_PROJECT_URL", "https://example.org/bagua/")
    text = provider().dynamic_metadata("readme")["text"]
    assert "](https://example.org/bagua/docs/algorithms.md)" in text
    assert links_into_the_project(text) == []


def test_links_are_absolute_or_text():
    of = provider().readable_elsewhere
    text = "[a](b.md), ![p](q.png) and [c](https://d.e), [f](#g)"
    assert of(text) == "a,  and [c](https://d.e), [f](#g)"
    assert of(text, "https://x") == (
        "[a](https://x/b.md), ![p](https://x/q.png) and [c](https://d.e), [f](#g)"
    )


def test_the_original_mlbench_core_beside_ours_is_told(monkeypatch, recwarn):
    mlbench_core._warn_of_the_original()
    assert len(recwarn) == 0
    monkeypatch.setattr(mlbench_core, "version", {"mlbench-core": "3.0.1"}.__getitem__)
    with pytest.warns(RuntimeWarning, match=r"mlbench-core 3\.0\.1 .*pip uninstall bagua mlben"):
        mlbench_core._warn_of_the_original()


def test_the_installed_package_names_its_license():
    try:
        installed = metadata.metadata("bagua")
    except metadata.PackageNotFoundError:
        pytest.fail("bagua is not installed in this environment: make build")
    assert installed["License-Expression"] == "Apache-2.0"
    assert installed["License-File"] == "LICENSE"
    assert any(need.startswith("torch==") for need in metadata.requires("bagua"))


def test_no_text_installs_a_package_called_bagua_from_an_index():
    """Another project has that name there."""
    files = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for folder, endings in {
        "python": {".py"},
        "csrc": {".h", ".cpp", ".cu"},
        "docs": {".md"},
        "tools": {"", ".py"},
    }.items():
        files += [path for path in (REPOSITORY / folder).rglob("*") if path.suffix in endings]
    files = [path for path in files if path.is_file()]
    assert len(files) > 300
    for path in files:
        text = re.sub(r'"\s*f?"', "", path.read_text())  # a string on several lines
        assert not re.search(r"pip install(\s+-\S+)*\s+[\"']?bagua\b", text), path
