"""Breaks the code on purpose, in a copy, and expects the tests that are named for it to fail.

    python tests/deep/mutations/mutate.py [--family sparse]... [--name part]... [--python-only]

Mutations are in the .toml files beside this program, one file per family. A mutation of Python runs
under a copy of the installed package; one of C++ builds a copy of the sources first, which takes
minutes the first time. Before they are expected to fail, the tests run without any mutation.

Prints a line for each: "caught", "survived" where the tests passed, "stale" where the file does not
have the text exactly once, "broken" where it does not compile or its tests fail without it. Exit
status 1 if one was not caught.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import bagua
import tomllib

ROOT = Path(__file__).resolve().parents[3]
WORK = ROOT / "build" / "mutations"
#: All that the extension is built from.
SOURCES = ("CMakeLists.txt", "cmake", "csrc", "python", "tests/cpp", "tests/fuzz")
SECONDS = 900
PASSED, FAILED = 0, 1  # exit statuses of pytest


@dataclass(frozen=True)
class Mutation:
    """A mistake: in `file`, `old` becomes `new`; `tests` are arguments of pytest."""

    family: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple

    @property
    def in_python(self):
        return self.file.startswith("python/")

    @property
    def applies(self):
        """Whether the file has the text exactly once."""
        path = ROOT / self.file
        return path.exists() and path.read_text().count(self.old) == 1

    def apply(self, path):
        path.write_text(path.read_text().replace(self.old, self.new))


def mutations():
    """All, in the order of their files."""
    return [
        Mutation(table.stem, entry["name"], entry["file"], entry["old"], entry["new"], tuple(tests))
        for table in sorted(Path(__file__).parent.glob("*.toml"))
        for group in tomllib.loads(table.read_text())["group"]
        for entry in group["mutation"]
        for tests in [entry.get("tests", group["tests"])]
    ]


def package(folder):
    """A copy of the installed package in the folder, its extension included."""
    for name in ("bagua", "mlbench_core"):
        installed = Path(bagua.__file__).parents[1] / name
        shutil.copytree(installed, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def pytest_status(site, tests, sources=ROOT):
    """Exit status of pytest with the packages of the folder `site`, and what it printed.

    The tests' own C++ programs are made from the folder `sources`.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(site),
            "OMP_NUM_THREADS": "1",
            "BAGUA_TEST_SOURCES": str(sources),
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout + done.stderr


class Program:
    """A copy of the sources with its extension, built again after each change."""

    def __init__(self):
        self.sources = WORK / "sources"
        self.site = WORK / "site"
        shutil.rmtree(self.site, ignore_errors=True)
        package(self.site)

    def update(self, mutation=None):
        """Copies what has changed, applies the mutation, builds; output if that fails."""
        for name in SOURCES:
            for path in [ROOT / name, *(ROOT / name).rglob("*")]:
                if path.is_file():
                    self._update_file(path, mutation)
        build = WORK / "cpp"
        configure = [
            *("cmake", "-S", self.sources, "-B", build, "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={self.site / 'bagua'}",
        ]
        for command in (configure, ["cmake", "--build", build, "--target", "_C"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                return done.stdout[-3000:] + done.stderr[-3000:]
        return ""

    def _update_file(self, path, mutation):
        """Unchanged files keep their time, or everything would be compiled again."""
        content = path.read_bytes()
        if mutation and path == ROOT / mutation.file:
            content = content.decode().replace(mutation.old, mutation.new).encode()
        copy = self.sources / path.relative_to(ROOT)
        if copy.exists() and copy.read_bytes() == content:
            return
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)


def verdict_of(status, text):
    """("caught" and the like, what a reader needs to see) of a mutated run."""
    if status == FAILED:
        return "caught", ""
    return ("survived", "") if status == PASSED else ("broken", text[-2000:])


def try_python(mutation):
    """The verdict of a mutation of Python."""
    with tempfile.TemporaryDirectory(prefix="bagua-mutation-") as folder:
        package(Path(folder))
        path = Path(folder) / Path(mutation.file).relative_to("python")
        if path.read_text().count(mutation.old) != 1:
            return "stale", "the installed package is another one: make build"
        mutation.apply(path)
        return verdict_of(*pytest_status(folder, mutation.tests))


def try_cpp(mutation, program):
    """The verdict of a mutation of C++."""
    problem = program.update(mutation)
    if problem:
        return "broken", problem
    return verdict_of(*pytest_status(program.site, mutation.tests, program.sources))


def verdicts(chosen):
    """Yields (mutation, verdict, text) of each."""
    passing = {}
    program = None
    for mutation in chosen:
        if not mutation.applies:
            yield mutation, "stale", f"{mutation.file} has not this text once:\n{mutation.old}"
            continue
        if mutation.tests not in passing:
            passing[mutation.tests] = pytest_status("", mutation.tests)
        status, text = passing[mutation.tests]
        if status != PASSED:
            yield mutation, "broken", f"its tests fail without it:\n{text[-2000:]}"
        elif mutation.in_python:
            yield mutation, *try_python(mutation)
        else:
            program = program or Program()
            yield mutation, *try_cpp(mutation, program)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", action="append", help="the name of a table")
    parser.add_argument("--name", action="append", help="a part of a mutation's name")
    parser.add_argument("--python-only", action="store_true", help="build nothing")
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in mutations()
        if mutation.family in (options.family or [mutation.family])
        and any(part in mutation.name for part in options.name or [""])
        and (mutation.in_python or not options.python_only)
    ]
    missed = 0
    for mutation, verdict, text in verdicts(chosen):
        missed += verdict != "caught"
        print(f"{verdict:8} {mutation.family}: {mutation.name}", flush=True)
        if text:
            print("    " + text.replace("\n", "\n    "), flush=True)
    print(f"{len(chosen)} mutations, {missed} not caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
