"""Builds the C++ programs of tests/cpp, each once per state of the sources."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from bagua import _C

__all__ = ["ROOT", "build", "build_library"]

ROOT = Path(__file__).resolve().parents[3]


def sources_digest(*more):
    """Of everything that a program may include, and of ``more`` texts."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("csrc", "tests/cpp"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file():
                digest.update(str(path).encode() + path.read_bytes())
    for text in more:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def build(name, arguments, *, compiler="g++", key=""):
    """Run ``compiler arguments -o build/cpp/<name>-<digest>``; returns the path as text.

    Built again when a source, the arguments or ``key`` change.
    """
    folder = ROOT / "build" / "cpp"
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{name}-{sources_digest(compiler, *arguments, key)}"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes one builds
        if not output.exists():
            for old in folder.glob(f"{name}-*"):
                old.unlink()
            unfinished = output.with_suffix(".unfinished")
            done = subprocess.run(
                [compiler, *arguments, "-o", str(unfinished)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert done.returncode == 0, f"{compiler} could not build {name}:\n{done.stderr}"
            os.replace(unfinished, output)
    return str(output)


def build_library(name, sources, flags=()):
    """A shared library of ``sources`` (paths from the root) that uses torch and bagua's core."""
    assert shutil.which("g++"), "g++ builds the programs of tests/cpp"
    torch_root = Path(torch.__file__).parent
    extension = Path(_C.__file__)
    arguments = [
        *("-std=c++20", "-O1", "-g1", "-fPIC", "-shared", "-Icsrc", "-Itests/cpp"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *("-isystem", f"{torch_root}/include"),
        *("-isystem", f"{torch_root}/include/torch/csrc/api/include"),
        *flags,
        *sources,
        f"-L{torch_root}/lib",
        *("-ltorch_cpu", "-lc10"),
        str(extension),
        f"-Wl,-rpath,{extension.parent}",
    ]
    return build(name, arguments, key=str(extension.stat().st_mtime_ns))
