"""Branches that only nvcc compiles otherwise, by g++ against a fake runtime that takes notes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.programs.cpp_programs import build_library

# torch is not imported: its library must find the fake's hooks when it is loaded.
RUN = """
import ctypes, sys
check = ctypes.CDLL(sys.argv[1]).runtime_calls
check.restype = ctypes.c_char_p
sys.exit(check().decode() or 0)
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
@pytest.mark.timeout(400)  # the first run builds the program
def test_flags_streams_and_pinned_memory_are_those_of_their_owner():
    torch_libraries = Path(torch.__file__).parent / "lib"
    library = build_library(
        "runtime_calls",
        "tests/cpp/fake_runtime/runtime_calls.cpp",
        ["-Itests/cpp/fake_runtime"],
        ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_libraries}"],
    )
    run = [sys.executable, "-c", RUN, library]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
