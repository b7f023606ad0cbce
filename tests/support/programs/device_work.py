"""Counts the work that ops give to a device, without having one: tests/cpp/device_work.

A launch is a kernel, a fill or a copy. An operation of ATen counts as one launch, and reads and
writes its tensor arguments and results once; operations that are several kernels on a GPU (topk,
sort, index_add) cost more than is counted, and one over a list of tensors is a launch for some 50
of them. A call of a communicator is a transfer: its own work is
not counted. Waits are those of the host for work of the same round.
"""

import json
import subprocess
import sys

from support.programs.cpp_programs import build_library

__all__ = ["BUCKET_NUMEL", "build_fake_device", "device_work"]

BUCKET_NUMEL = 10 * 2**20 // 4  # 10 MiB of float32

RUN = """
import ctypes, sys
import torch  # the libraries that the program is linked with
from bagua import _C
count = ctypes.CDLL(sys.argv[1]).device_work
count.argtypes = (ctypes.c_int, ctypes.c_int64)
for ranks in sys.argv[3:]:
    count(int(ranks), int(sys.argv[2]))
"""


def build_fake_device():
    """The library of tests/cpp/device_streams and device_work: one program for both."""
    return build_library("device_streams", "tests/cpp/device_streams/device_streams.cpp")


def device_work(ranks, numel=BUCKET_NUMEL):
    """Rows of one rank's work in one round, for each op and number of ``ranks`` (a sequence).

    ``op``, ``ranks``, ``launches``, ``transfers``, ``waits``, and ``read`` and ``written`` in bytes
    per element of a bucket of ``numel`` float32; rows "..., own part" per element of that part.
    """
    command = [sys.executable, "-c", RUN, build_fake_device(), str(numel), *map(str, ranks)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]
