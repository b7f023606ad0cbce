"""Builds the C++ programs of tests/cpp, each once per state of the sources."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from bagua import _C

__all__ = ["CCACHE", "ROOT", "build_library", "command", "kept"]

#: The repository, or the copy of it that a mutation is tried in.
ROOT = Path(os.environ.get("BAGUA_TEST_SOURCES", Path(__file__).resolve().parents[3]))
#: In front of a compiler: objects of other clones serve as well.
CCACHE = ["env", f"CCACHE_BASEDIR={ROOT}", "CCACHE_NOHASHDIR=1", "ccache"]
CCACHE = CCACHE if shutil.which("ccache") else []


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


def build_library(name, source, flags=(), libraries=None):
    """The path of a shared library of ``source``, which may include torch's headers.

    libraries: what it is linked with; by default torch and bagua's core.
    """
    torch_root = Path(torch.__file__).parent
    key = ""
    if libraries is None:
        core = Path(_C.__file__)
        libraries = ["-ltorch_cpu", "-lc10", str(core), f"-Wl,-rpath,{core.parent}"]
        key = str(core.stat().st_mtime_ns)
    compiles = [
        *("g++", "-std=c++20", "-O1", "-g1", "-fPIC", *flags, "-Icsrc", "-Itests/cpp"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *("-isystem", f"{torch_root}/include"),
        *("-isystem", f"{torch_root}/include/torch/csrc/api/include"),
        *("-c", source),
    ]
    links = [f"-L{torch_root}/lib", *libraries]

    def make(folder):
        command([*CCACHE, *compiles, "-o", folder / "object.o"])
        command(["g++", "-shared", folder / "object.o", *links, "-o", folder / name])

    return str(kept(name, make, *compiles, *links, key) / name)


def command(words):
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{words}:\n{done.stderr[-4000:]}"
    return done.stdout
