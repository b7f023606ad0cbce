"""Packages of continuous integration are pinned, and CONTRIBUTING.md has a reason for each."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    "requirements-dev.txt",
    "requirements-integrations.txt",
    "requirements-engines.txt",
    "requirements-trainers.txt",
    "requirements-mailbox.txt",
    "tools/horovod-requirements.txt",
]


def requirements(file):
    lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    return [line for line in lines if line]


def packages_with_reasons():
    table = re.findall(
        r"^\| ([a-z0-9, -]+) \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )
    return {name for names, reason in table for name in names.split(", ") if len(reason) > 5}


@pytest.mark.parametrize("file", FILES)
def test_every_package_is_pinned_to_one_version(file):
    assert len(requirements(file)) > 5
    for requirement in requirements(file):
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.+]*", requirement), requirement


@pytest.mark.parametrize("file", FILES)
def test_every_package_has_a_reason(file):
    names = {requirement.split("==")[0] for requirement in requirements(file)}
    assert names - packages_with_reasons() == set()


#: Package -> the module that says which release of it is known to work.
ADAPTERS = {
    "lightning": "lightning/__init__.py",
    "pytorch-lightning": "lightning/__init__.py",
    "accelerate": "integrations/accelerate.py",
    "transformers": "integrations/transformers.py",
}


@pytest.mark.parametrize("package", ADAPTERS)
def test_the_release_that_an_error_names_is_the_tested_one(package):
    pins = dict(line.split("==") for line in requirements("requirements-integrations.txt"))
    source = (ROOT / "python/bagua" / ADAPTERS[package]).read_text()
    assert f'TESTED = "{pins[package]}"' in source
