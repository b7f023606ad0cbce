"""NCCL over host memory (tests/cpp/fake_nccl), ranks that are threads, and a fake CUDA."""

import ctypes
import importlib.util
import itertools
import sysconfig
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from bagua import _C
from support.programs.cpp_programs import build_library
from support.threads.thread_ranks import run_threads

CPU = torch.device("cpu")

STREAMS_PER_GPU = 8  # kStreamsPerDevice of tests/cpp/fake_nccl

_groups = itertools.count()
_gpus = itertools.count(1)


def nccl_wheel():
    """The folder of the nvidia-nccl wheel, with include/ and lib/."""
    return Path(importlib.util.find_spec("nvidia.nccl").submodule_search_locations[0])


def build_fake_nccl():
    """The path of the library, or None without nccl.h."""
    if not _C.has_nccl:
        return None
    flags = ["-Icsrc/comm/nccl/needs", "-isystem", f"{nccl_wheel()}/include"]
    return build_library(
        "fake_nccl", "tests/cpp/fake_nccl/fake_nccl.cpp", flags, ["-Wl,-Bsymbolic"]
    )


def build_fake_cuda():
    flags = ["-isystem", sysconfig.get_paths()["include"]]
    libraries = ["-Wl,-Bsymbolic", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    return build_library("fake_cuda", "tests/cpp/fake_device/fake_cuda.cpp", flags, libraries)


def build_fake_driver():
    """A libcuda.so.1 that says whether a graph is captured, and notes how threads take captures."""
    source = "tests/cpp/fake_device/fake_driver.cpp"
    return build_library("fake_driver", source, libraries=["-Wl,-soname,libcuda.so.1"])


def _address(function):
    return ctypes.cast(function, ctypes.c_void_p)


class FakeCuda:
    """A device "cuda:1" over host memory, with switches for its events (fake_cuda_*)."""

    def __init__(self):
        # PyDLL keeps the GIL, which making a tensor needs.
        self._functions = ctypes.PyDLL(build_fake_cuda())
        self._functions.fake_cuda_tensor.restype = ctypes.py_object
        self._functions.fake_cuda_tensor.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._functions.fake_cuda_set_stream.argtypes = [ctypes.c_int64]
        self._functions.fake_cuda_stream.restype = ctypes.c_int64
        self._functions.fake_cuda_follow.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def __getattr__(self, name):
        return getattr(self._functions, f"fake_cuda_{name}")

    def on_device(self, host):
        """A tensor on "cuda:1" with the memory of a float32 one, which must outlive it."""
        return self.tensor(host.data_ptr(), host.numel())

    def begin_rank(self, device):
        """``device`` becomes the calling thread's, with a stream on a separate GPU."""
        self.set_device(device.index)
        self.set_stream(next(_gpus) * STREAMS_PER_GPU)


class FakeNccl:
    """The loaded library, with its switches for faults (fake_nccl_*) as attributes."""

    def __init__(self):
        path = build_fake_nccl()
        self.library = _C.NcclLibrary.open(path)
        self._functions = ctypes.CDLL(path)
        self._functions.fake_nccl_misuse.restype = ctypes.c_char_p
        self._functions.fake_nccl_last_stream.restype = ctypes.c_void_p
        self._functions.fake_nccl_given.argtypes = [ctypes.c_void_p]
        self._functions.fake_nccl_look_at_devices.argtypes = [ctypes.c_void_p]
        self._functions.fake_nccl_occupy.argtypes = [ctypes.c_void_p]
        self._functions.fake_nccl_given.restype = ctypes.c_uint64
        self._functions.fake_nccl_have_ended.argtypes = [ctypes.c_void_p, ctypes.c_uint64]

    def __getattr__(self, name):
        return getattr(self._functions, f"fake_nccl_{name}")

    def lead(self, cuda):
        """Events of the fake CUDA come true when kernels of this library have ended.

        Calls must come with the fake CUDA's current device set to their communicator's.
        """
        cuda.follow(_address(self.given), _address(self.have_ended))
        self.look_at_devices(_address(cuda.device))

    def begin_thread(self):
        """Called first in the thread of each rank."""

    def calls_of(self, name):
        return self.count(name.encode())

    def connect(self, store, rank, size, timeout=20.0, device=CPU):
        return _C.NcclCommunicator(self.library, store, rank, size, device, timeout)

    def ranks(self, functions, timeout=20.0, device=CPU):
        """functions[r](communicator) on rank r of as many threads: (result, error) of each.

        Connecting counts as part of the function. timeout: seconds, of each call.
        """
        n = len(functions)
        store = dist.PrefixStore(f"group{next(_groups)}", dist.HashStore())
        outcomes = [(None, None)] * n

        def run(rank):
            self.begin_thread()
            try:
                communicator = self.connect(store, rank, n, timeout, device)
                outcomes[rank] = (functions[rank](communicator), None)
            except Exception as error:  # noqa: BLE001 - the tests look at it
                error.add_note(traceback.format_exc())
                outcomes[rank] = (None, error)

        run_threads(n, run)
        return outcomes

    def run(self, n, function, timeout=20.0, device=CPU):
        """The results of function(communicator) on n ranks; the first error is raised."""
        outcomes = self.ranks([function] * n, timeout, device)
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]
