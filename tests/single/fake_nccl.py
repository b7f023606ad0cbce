"""NCCL over host memory (tests/cpp/fake_nccl.cpp): built once, and ranks that are threads."""

import ctypes
import fcntl
import hashlib
import importlib.util
import itertools
import subprocess
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from bagua import _C

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = sorted((REPOSITORY / "tests" / "cpp").glob("fake_nccl*"))
CPU = torch.device("cpu")

_groups = itertools.count()


def nccl_wheel():
    """The folder of the nvidia-nccl wheel, with include/ and lib/."""
    return Path(importlib.util.find_spec("nvidia.nccl").submodule_search_locations[0])


def build():
    """The library's path; compiled into build/fake_nccl unless these sources were already."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]
    folder = REPOSITORY / "build" / "fake_nccl"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"fake_nccl_{digest}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            subprocess.run(
                [
                    *[
                        "g++",
                        "-std=c++20",
                        "-O1",
                        "-fPIC",
                        "-shared",
                        "-Wall",
                        "-Wextra",
                        "-Werror",
                    ],
                    "-Wl,-Bsymbolic",  # its own functions, not those of an NCCL that torch loaded
                    *["-I", str(REPOSITORY / "csrc" / "comm" / "nccl_needs")],
                    *["-isystem", str(nccl_wheel() / "include")],
                    *["-isystem", str(Path(torch.__file__).parent / "include")],
                    *["-o", str(unfinished), str(REPOSITORY / "tests" / "cpp" / "fake_nccl.cpp")],
                ],
                check=True,
            )
            unfinished.rename(library)
    return library


class FakeNccl:
    """The loaded library, with its switches for faults (fake_nccl_*) as attributes."""

    def __init__(self):
        path = str(build())
        self.library = _C.NcclLibrary.open(path)
        self._functions = ctypes.CDLL(path)
        self._functions.fake_nccl_misuse.restype = ctypes.c_char_p
        self._functions.fake_nccl_last_stream.restype = ctypes.c_void_p

    def __getattr__(self, name):
        return getattr(self._functions, f"fake_nccl_{name}")

    def calls_of(self, name):
        return self.count(name.encode())

    def connect(self, store, rank, size, timeout=20.0, device=CPU):
        return _C.NcclCommunicator(self.library, store, rank, size, device, timeout)

    def ranks(self, functions, timeout=20.0):
        """functions[r](communicator) on rank r of as many threads: (result, error) of each.

        Connecting counts as part of the function. timeout: seconds, of each call.
        """
        n = len(functions)
        store = dist.PrefixStore(f"group{next(_groups)}", dist.HashStore())
        outcomes = [(None, None)] * n

        def run(rank):
            try:
                communicator = self.connect(store, rank, n, timeout)
                outcomes[rank] = (functions[rank](communicator), None)
            except Exception as error:  # noqa: BLE001 - the tests look at it
                error.add_note(traceback.format_exc())
                outcomes[rank] = (None, error)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def run(self, n, function, timeout=20.0):
        """The results of function(communicator) on n ranks; the first error is raised."""
        outcomes = self.ranks([function] * n, timeout)
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]
