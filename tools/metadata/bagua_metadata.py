"""Metadata that depends on the build: which torch a wheel needs, and a README without dead links.

scikit-build-core asks for both (pyproject.toml). A wheel works with the minor release of torch that
it was built against, and says so, or pip would install another one; a source distribution is built
against whatever torch there is. Before a wheel is built, `missing` tells in a line what it lacks.
"""

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ANY_TORCH = "torch>=2.11"
#: What the compiler takes for a file of the binding.
GIB_PER_COMPILER = 1.5
#: `[text](target)` and `![text](target)` with a target inside the project.
RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def dynamic_metadata(field, settings=None, *_):
    """The value of `dependencies` or `readme`; settings: {"pinned": bool} for the former."""
    if field == "dependencies":
        if not (settings or {}).get("pinned"):
            return [ANY_TORCH]
        if fault := missing():
            raise SystemExit(f"bagua cannot be built: {fault}")
        if advice := too_many_compilers(memory_gib(), compilers()):
            sys.stderr.write(f"bagua: {advice}\n")
        return [pinned_torch(version("torch"))]
    if field == "readme":
        text = Path("README.md").read_text(encoding="utf-8")
        return {
            "content-type": "text/markdown",
            "text": readable_elsewhere(text, os.environ.get("BAGUA_PROJECT_URL")),
        }
    raise ValueError(f"there is no provider for the field {field!r}")


def missing():
    """The first thing that a build needs and this machine lacks, with the remedy, or None."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return "there is no torch. Install torch >= 2.11, then: pip install . --no-build-isolation"
    if tuple(map(int, torch.split(".")[:2])) < (2, 11):
        return f"torch {torch} is too old. Install torch >= 2.11."
    for program in ("cmake", "ninja"):
        if shutil.which(program) is None and importlib.util.find_spec(program) is None:
            return f"there is no {program}. pip install {program}"
    given = os.environ.get("CXX", "").split()[:1]
    if not any(map(shutil.which, given or ("c++", "g++", "clang++"))):
        what = f"CXX={given[0]} is not a program" if given else "there is no C++ compiler"
        return f"{what}. Install g++ >= 12 (apt install g++), or name another compiler in CXX."
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        return f"there is no Python.h in {headers}. Install it (apt install python3-dev)."
    return None


def compilers():
    """The processes that compile at a time."""
    return int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or os.cpu_count() or 1)


def memory_gib(meminfo=Path("/proc/meminfo")):
    """Memory and swap that are free, in GiB."""
    if not meminfo.exists():
        return float("inf")
    kib = re.findall(r"^(?:MemAvailable|SwapFree): *(\d+) kB", meminfo.read_text(), re.MULTILINE)
    return sum(map(int, kib)) / 2**20


def too_many_compilers(memory, processes):
    """What to do where `memory` GiB do not hold so many compiler processes, or None."""
    if memory >= processes * GIB_PER_COMPILER:
        return None
    most = int(memory / GIB_PER_COMPILER)
    remedy = f"set CMAKE_BUILD_PARALLEL_LEVEL={most}" if most else "end other programs or add swap"
    return (
        f"{memory:.1f} GiB of memory are free, and {processes} compiler process(es) take"
        f" {GIB_PER_COMPILER} GiB each: {remedy}."
    )


def get_requires_for_dynamic_metadata(_settings=None):
    return []


def pinned_torch(installed):
    """The requirement that admits the minor release of an installed torch: "2.13.0+cpu"."""
    major, minor = installed.split("+")[0].split(".")[:2]
    return f"torch=={major}.{minor}.*"


def readable_elsewhere(text, url=None):
    """The README for a page that has no other files of the project.

    Links into the project become links below `url`, the address of its files; without one they
    become their text, and pictures go.
    """

    def replace(link):
        picture, words, target = link.groups()
        if url:
            return f"{picture}[{words}]({url.rstrip('/')}/{target})"
        return "" if picture else words

    return RELATIVE_LINK.sub(replace, text)
