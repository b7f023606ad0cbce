"""Builds and runs the programs that emulate the CUDA kernels on the CPU.

They are kernels/ and emulation/ of tests/cpp; they need g++ alone, no torch and no CUDA.
"""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.programs.cpp_programs import CCACHE, ROOT, kept

#: Folders of all that the kernels and their programs include.
SOURCES = ("csrc/base", "csrc/codec", "csrc/comm/nccl", "csrc/math", "tests/cpp")
COMMON_FLAGS = ["-std=c++20", "-Icsrc", "-Itests/cpp", "-DBAGUA_EMULATE_CUDA", "-g1"]
COMMON_FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
COMMON_FLAGS += ["-Wall", "-Wextra", "-Werror"]
# Accesses behind null, objects and pointers that overflow are AddressSanitizer's: another check of
# each pointer would double the time to compile.
SANITIZE_ADDRESS = (
    "-fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow,vptr"
    " -fno-sanitize-recover=all"
)
# Name -> flags, and where they differ those of the emulation itself, which is not code under test.
VARIANTS = {
    "plain": ("-O1 -g0", "-O1 -g0"),
    "address": (f"-O1 {SANITIZE_ADDRESS}", f"-O1 {SANITIZE_ADDRESS}"),
    "thread": ("-O1 -fsanitize=thread", "-O1 -DBAGUA_TSAN"),
}
EMULATION = ("tests/cpp/emulation/cuda_emulation.cpp", "tests/cpp/emulation/fiber.cpp")
# Compared with the kernels; as in the product in every variant: the fuzz targets sanitize it.
REFERENCE = "csrc/codec/chunk_codec_cpu.cpp"
# Lines of this file would cost those of all others: with its debug information g++ 12's
# ThreadSanitizer names functions without file and line.
WITHOUT_LINES = {("thread", "csrc/codec/cuda/fused_codec_cuda.cu"): "-g0"}
PROGRAMS = {
    "kernels": (
        "tests/cpp/kernels/kernels.cpp",
        "csrc/codec/cuda/chunk_codec_cuda.cu",
        "csrc/codec/cuda/frame_kernels_cuda.cu",
        "csrc/codec/cuda/fused_codec_cuda.cu",
        "csrc/codec/cuda/fused_slice_codec_cuda.cu",
        "csrc/codec/cuda/sparse_codec_cuda.cu",
        "csrc/codec/index_code.cpp",
        "csrc/math/cuda/low_rank_kernels_cuda.cu",
        "csrc/math/low_rank_plan.cpp",
        "csrc/math/top_k.cpp",
        REFERENCE,  # the last: of inline functions that several have, the first is linked
    ),
    "emulation_faults": ("tests/cpp/emulation/emulation_faults.cpp",),
}

marks = [
    pytest.mark.timeout(900),  # the first run compiles
    pytest.mark.skipif(
        shutil.which("g++") is None or platform.machine() != "x86_64",
        reason="the emulation of CUDA needs g++ on x86-64",
    ),
]


def compile_object(source, flags, target):
    command = [*CCACHE, "g++", *COMMON_FLAGS, *flags.split(), "-xc++", "-c", source, "-o", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def build(variant, folder):
    """The variant's programs, in the folder under their names."""
    flags, emulation_flags = VARIANTS[variant]
    jobs = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for source in {*EMULATION, *sum(PROGRAMS.values(), ())}:
            of_source = emulation_flags if source in EMULATION else flags
            if source == REFERENCE:
                of_source, _ = VARIANTS["plain"]
            of_source += " " + WITHOUT_LINES.get((variant, source), "")
            target = folder / f"{Path(source).name}.o"
            jobs[source] = (target, pool.submit(compile_object, source, of_source, target))
    for source, (_, job) in jobs.items():
        assert job.result().returncode == 0, f"{variant}, {source}:\n{job.result().stderr}"
    for program, own in PROGRAMS.items():
        objects = [jobs[source][0] for source in (*own, *EMULATION)]
        subprocess.run(["g++", *flags.split(), *objects, "-o", folder / program], check=True)
    for object_file in folder.glob("*.o"):
        object_file.unlink()


def programs(variant):
    """The folder with the variant's programs."""
    own = Path(__file__).read_text()
    return kept(variant, lambda folder: build(variant, folder), own, folders=SOURCES)


def run(variant, program, *arguments):
    command = [programs(variant) / program, *arguments]
    # ThreadSanitizer of g++ 12 cannot start where address randomisation is too strong.
    fixed_addresses = ["setarch", "-R"]
    if variant == "thread" and subprocess.run([*fixed_addresses, "true"]).returncode == 0:
        command = [*fixed_addresses, *command]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)
