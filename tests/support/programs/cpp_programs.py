"""Builds the C++ programs of tests/cpp, each once per state of the sources."""

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

import torch
from bagua import _C

__all__ = ["ROOT", "build", "build_library", "kept"]

ROOT = Path(__file__).resolve().parents[3]


def sources_digest(folders, texts):
    """Of everything in the folders, which a program may include, and of the texts."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file():
                digest.update(str(path).encode() + path.read_bytes())
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def kept(name, make, *texts, folders=("csrc", "tests/cpp")):
    """The folder build/cpp/<name>-<digest>, which ``make(folder)`` fills.

    Made again when a file of ``folders``, ``texts`` or the compiler change.
    """
    version = subprocess.check_output(["g++", "--version"], text=True)
    cache = ROOT / "build" / "cpp"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{name}-{sources_digest(folders, (version, *texts))}"
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes one builds
        if not folder.exists():
            for old in cache.glob(f"{name}-*"):
                shutil.rmtree(old)
            unfinished = cache / f"unfinished.{name}"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


def build(name, arguments, *, key=""):
    """Run ``g++ arguments -o <name>``; returns the path as text."""

    def compile_program(folder):
        done = subprocess.run(
            ["g++", *arguments, "-o", folder / name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, f"g++ could not build {name}:\n{done.stderr}"

    return str(kept(name, compile_program, *arguments, key) / name)


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
