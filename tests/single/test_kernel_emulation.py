"""The CUDA kernels, run on the CPU: see kernels/ and emulation/ in tests/cpp.

The programs need g++ alone, no torch and no CUDA. They are kept in build/kernel_emulation and made
anew only when their sources change.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bagua import _C

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "kernel_emulation"

COMMON_FLAGS = ["-std=c++20", "-Icsrc", "-Itests/cpp", "-DBAGUA_EMULATE_CUDA", "-g1"]
COMMON_FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
COMMON_FLAGS += ["-Wall", "-Wextra", "-Werror"]
# Accesses behind null, objects and pointers that overflow are AddressSanitizer's: another check of
# each pointer would double the time to compile.
SANITIZE_ADDRESS = (
    "-fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow,vptr"
    " -fno-sanitize-recover=all"
)
# Name -> flags, and where they differ those of the emulation itself, which is no code under test.
VARIANTS = {
    "plain": ("-O2", "-O2"),
    "address": (f"-O1 {SANITIZE_ADDRESS}", f"-O1 {SANITIZE_ADDRESS}"),
    "thread": ("-O1 -fsanitize=thread", "-O1 -DBAGUA_TSAN"),
}
EMULATION = ("tests/cpp/emulation/cuda_emulation.cpp", "tests/cpp/emulation/fiber.cpp")
# Compared with the kernels, and the same in every variant: test_fuzz.py has it under sanitizers.
REFERENCE = "csrc/codec/chunk_codec_cpu.cpp"
# Lines of this file would cost those of all others: with its debug information g++ 12's
# ThreadSanitizer names functions without file and line.
WITHOUT_LINES = {("thread", "csrc/codec/cuda/fused_codec_cuda.cu"): "-g0"}
PROGRAMS = {
    "kernels": (
        "tests/cpp/kernels/kernels.cpp",
        "csrc/codec/cuda/chunk_codec_cuda.cu",
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

pytestmark = [
    pytest.mark.timeout(900),  # the first run compiles
    pytest.mark.skipif(
        shutil.which("g++") is None or platform.machine() != "x86_64",
        reason="the emulation of CUDA needs g++ on x86-64",
    ),
]


def sources():
    folders = ("csrc/base", "csrc/codec", "csrc/comm/nccl", "csrc/math", "tests/cpp")
    suffixes = {".h", ".cpp", ".cu", ".cuh"}
    files = [file for folder in folders for file in sorted((REPOSITORY / folder).rglob("*"))]
    return [file for file in files if file.suffix in suffixes]


def fingerprint():
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(subprocess.check_output(["g++", "--version"]))
    for file in sources():
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def compile_object(source, flags, target):
    launcher = ["ccache"] if shutil.which("ccache") else []
    command = [*launcher, "g++", *COMMON_FLAGS, *flags.split(), "-xc++", "-c", source, "-o", target]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def build(folder):
    """All programs in all variants: <folder>/<variant>-<program>."""
    jobs = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for variant, (flags, emulation_flags) in VARIANTS.items():
            for source in {*EMULATION, *sum(PROGRAMS.values(), ())}:
                if source == REFERENCE and variant != "plain":
                    continue
                of_source = emulation_flags if source in EMULATION else flags
                of_source += " " + WITHOUT_LINES.get((variant, source), "")
                target = folder / f"{variant}-{Path(source).name}.o"
                jobs[variant, source] = (
                    target,
                    pool.submit(compile_object, source, of_source, target),
                )
    for (variant, source), (_, job) in jobs.items():
        assert job.result().returncode == 0, f"{variant}, {source}:\n{job.result().stderr}"
    for variant, (flags, _) in VARIANTS.items():
        for program, own in PROGRAMS.items():
            objects = [
                jobs["plain" if source == REFERENCE else variant, source][0]
                for source in (*own, *EMULATION)
            ]
            command = ["g++", *flags.split(), *objects, "-o", folder / f"{variant}-{program}"]
            subprocess.run(command, check=True)
    for object_file in folder.glob("*.o"):
        object_file.unlink()


@pytest.fixture(scope="module")
def programs():
    folder = BUILD / fingerprint()
    if not folder.exists():
        shutil.rmtree(BUILD, ignore_errors=True)
        unfinished = BUILD / f"unfinished-{os.getpid()}"
        unfinished.mkdir(parents=True)
        build(unfinished)
        unfinished.rename(folder)
    return folder


def run(programs, variant, program, *arguments):
    command = [programs / f"{variant}-{program}", *arguments]
    # ThreadSanitizer of g++ 12 cannot start where address randomisation is too strong.
    fixed_addresses = ["setarch", "-R"]
    if variant == "thread" and subprocess.run([*fixed_addresses, "true"]).returncode == 0:
        command = [*fixed_addresses, *command]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_give_the_bytes_of_the_cpu_codecs(programs, variant):
    arguments = {"plain": [], "address": ["--quick"], "thread": ["--races"]}[variant]
    # Addresses and barriers depend on the width of the elements, and bfloat16's is float16's.
    dtypes = ["float32", "float16"] + ["bfloat16"] * (variant == "plain")
    result = run(programs, variant, "kernels", *arguments)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[:4000]
    lines = result.stdout.splitlines()
    assert lines[-1] == "all equal"
    for codec in _C.codec_names():
        for dtype in dtypes:
            assert any(line.startswith(f"{codec}, {dtype}: ") for line in lines)


def test_a_missing_barrier_in_the_kernels_is_found_as_a_race(programs):
    result = run(programs, "thread", "kernels", "--races", "--skip-barrier", "1")
    assert result.returncode != 0
    assert "data race" in result.stderr
    assert "range_kernels.cuh:" in result.stderr


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_emulation_runs_a_correct_kernel(programs, variant):
    result = run(programs, variant, "emulation_faults", "correct")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("misaligned_load", "misaligned address .* of an access of 16 bytes by thread 0"),
        ("misaligned_store", "misaligned address .* of an access of 8 bytes by thread 0"),
        ("divergent_barriers", "divergent barriers: thread 0 .*, thread 32 "),
        ("missing_thread", "thread 0 waits at the barrier at .*, thread 40 has ended"),
        ("missing_lane", "a lane is missing from an operation of the warp: .* thread 5 has ended"),
        ("different_masks", "lanes of one mask meet different operations"),
        ("foreign_mask", "thread 16 is not in its own mask"),
        ("source_outside_mask", "reads from lane 20, which is not in its mask"),
        ("deadlock", "deadlock, barrier or warp divergence: thread 0 .*, thread 16 waits for its"),
    ],
)
def test_undefined_behaviour_of_a_gpu_ends_the_program(programs, fault, message):
    result = run(programs, "plain", "emulation_faults", fault)
    assert result.returncode == 3, result.stdout + result.stderr
    assert re.search(message, result.stderr), result.stderr


@pytest.mark.parametrize(
    "fault",
    ["missing_barrier", "race_between_barriers", "warp_barrier_for_all", "shuffle_as_fence"],
)
def test_memory_without_a_barrier_is_a_race_whatever_the_order(programs, fault):
    assert run(programs, "plain", "emulation_faults", fault).returncode == 0
    result = run(programs, "thread", "emulation_faults", fault)
    assert result.returncode != 0
    assert "data race" in result.stderr
    assert "emulation_faults.cpp:" in result.stderr


def test_address_sanitizer_reports_a_misaligned_access_too(programs):
    result = run(programs, "address", "emulation_faults", "misaligned_load")
    assert result.returncode != 0
    assert "misaligned address" in result.stderr
