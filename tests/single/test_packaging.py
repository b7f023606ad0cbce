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


def test_what_a_build_lacks_is_told_in_a_line_before_anything_is_compiled(monkeypatch, tmp_path):
    build = provider()
    assert build.missing() is None
    programs = {"cmake", "ninja", "c++", "g++", "clang++"}
    monkeypatch.setattr(build.shutil, "which", lambda name: name if name in programs else None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda _: None)
    monkeypatch.delenv("CXX", raising=False)
    assert build.missing() is None
    monkeypatch.setattr(build.sysconfig, "get_path", lambda _: str(tmp_path))
    assert "no Python.h" in build.missing()
    programs -= {"c++", "g++", "clang++"}
    assert build.missing().startswith("there is no C++ compiler. Install g++ >= 12")
    monkeypatch.setenv("CXX", "ccache none")
    assert build.missing().startswith("CXX=ccache is not a program")
    programs.remove("ninja")
    assert build.missing() == "there is no ninja. pip install ninja"
    programs.remove("cmake")
    assert build.missing() == "there is no cmake. pip install cmake"
    monkeypatch.setattr(build, "version", lambda _: "2.9.1+cpu")
    assert build.missing() == "torch 2.9.1+cpu is too old. Install torch >= 2.11."
    with pytest.raises(SystemExit, match="bagua cannot be built: torch 2"):
        build.dynamic_metadata("dependencies", {"pinned": True})


def test_memory_for_fewer_compilers_than_are_started_is_told(tmp_path):
    build = provider()
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 3145728 kB\nSwapFree: 1 kB\n")
    memory = build.memory_gib(tmp_path / "meminfo")
    assert 3.0 < memory < 3.01
    assert build.too_many_compilers(memory, 2) is None
    assert "set CMAKE_BUILD_PARALLEL_LEVEL=2" in build.too_many_compilers(memory, 3)
    assert "end other programs or add swap" in build.too_many_compilers(1.4, 1)
    assert build.memory_gib(tmp_path / "none") == float("inf")


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
