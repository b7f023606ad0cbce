"""Packages of continuous integration are pinned, and docs/security.md has a reason for each."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ["requirements-dev.txt", "tools/horovod-requirements.txt"]


def requirements(file):
    lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    return [line for line in lines if line]


def packages_with_reasons():
    table = re.findall(
        r"^\| ([a-z0-9, -]+) \| (.+) \|$", (ROOT / "docs/security.md").read_text(), re.M
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
