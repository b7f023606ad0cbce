"""What nvcc makes of the CUDA kernels, its PTX, run on the CPU beside the CPU codecs.

Each kernel's PTX becomes C++ (support/programs/ptx_to_cpp.py) and takes the place of the kernel
that g++ compiles, in the program of tests/single/test_kernel_emulation.py.
"""

import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.programs import ptx_to_cpp

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "kernels_of_ptx"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
KERNELS = [
    "csrc/codec/cuda/chunk_codec_cuda.cu",
    "csrc/codec/cuda/frame_kernels_cuda.cu",
    "csrc/codec/cuda/fused_codec_cuda.cu",
    "csrc/codec/cuda/fused_slice_codec_cuda.cu",
    "csrc/codec/cuda/sparse_codec_cuda.cu",
    "csrc/comm/nccl/fill_if_set.cu",
    "csrc/math/cuda/low_rank_kernels_cuda.cu",
    "csrc/math/cuda/random_order_cuda.cu",
]
OTHERS = [
    "csrc/codec/chunk_codec_cpu.cpp",
    "csrc/codec/index_code.cpp",
    "csrc/math/low_rank_plan.cpp",
    "csrc/math/random_order.cpp",
    "csrc/math/top_k.cpp",
    "tests/cpp/emulation/cuda_emulation.cpp",
    "tests/cpp/emulation/fiber.cpp",
    "tests/cpp/kernels/kernels.cpp",
    "tests/cpp/ptx/translations.cpp",
]
OF_NVCC = ["-std=c++20", "-O3", "-fmad=false", "-Icsrc", "-arch=compute_90", "-ptx"]
OF_GXX = ["-std=c++20", "-Icsrc", "-Itests/cpp", "-DBAGUA_EMULATE_CUDA", "-ffp-contract=off"]
OF_GXX += ["-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"]

pytestmark = [
    pytest.mark.timeout(1800),  # the first run compiles
    pytest.mark.skipif(
        NVCC is None or shutil.which("g++") is None,
        reason="what nvcc makes of the kernels needs nvcc, and g++",
    ),
]


def command(*words):
    done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}:\n{done.stderr[-4000:]}"
    return done.stdout


def compile_cpp(source, level, target):
    launcher = ["ccache"] if shutil.which("ccache") else []
    command(*launcher, "g++", *OF_GXX, level, "-xc++", "-c", source, "-o", target)


def translate(source, folder):
    """PTX, then C++, then an object, of one file of kernels; its name in the table."""
    name = Path(source).stem
    ptx, cpp = folder / f"{name}.ptx", folder / f"{name}.ptx.cpp"
    command(NVCC, *OF_NVCC, source, "-o", ptx)
    cpp.write_text(ptx_to_cpp.translate(ptx.read_text(), name))
    compile_cpp(cpp, "-O0", folder / f"{name}.ptx.o")
    return name


def build(folder):
    # The hosts' side, without that of fill_if_set.cu, whose kernel the program launches itself.
    hosts = [*OTHERS, *(source for source in KERNELS if "codec" in source or "math" in source)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = [pool.submit(translate, source, folder) for source in KERNELS]
        objects = [
            pool.submit(compile_cpp, source, "-O1", folder / f"{Path(source).name}.o")
            for source in hosts
        ]
        for job in objects:
            job.result()
        table = folder / "table.cpp"
        table.write_text(ptx_to_cpp.table([job.result() for job in names]))
    compile_cpp(table, "-O0", folder / "table.o")
    # -rdynamic: a kernel's address tells its name.
    command("g++", "-rdynamic", *folder.glob("*.o"), "-ldl", "-o", folder / "kernels")


@pytest.fixture(scope="module")
def program():
    digest = hashlib.sha256(Path(__file__).read_bytes() + Path(ptx_to_cpp.__file__).read_bytes())
    digest.update(command(NVCC, "--version").encode())
    for folder in ("csrc/base", "csrc/codec", "csrc/comm/nccl", "csrc/math", "tests/cpp"):
        for file in sorted((ROOT / folder).rglob("*.*")):
            digest.update(file.name.encode() + file.read_bytes())
    folder = BUILD / digest.hexdigest()[:16]
    if not folder.exists():
        shutil.rmtree(BUILD, ignore_errors=True)
        unfinished = BUILD / f"unfinished-{os.getpid()}"
        unfinished.mkdir(parents=True)
        build(unfinished)
        unfinished.rename(folder)
    return folder / "kernels"


def test_ptx_of_every_kernel_gives_the_bytes_of_the_cpu_codecs(program):
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "all equal" in done.stdout
    ran, known, launches = map(
        int, re.search(r"PTX: (\d+) of (\d+) kernels ran, (\d+) launches", done.stdout).groups()
    )
    assert ran == known > 0, done.stdout[-4000:]
    assert launches > ran


def test_an_instruction_that_is_not_known_does_not_compile(tmp_path):
    ptx = """
.visible .entry kernel(
	.param .u64 kernel_param_0
)
{
	.reg .b32 	%r<2>;
	brev.b32 	%r1, 7;
	ret;

}
"""
    cpp = tmp_path / "unknown.cpp"
    cpp.write_text(ptx_to_cpp.translate(ptx, "unknown"))
    with pytest.raises(AssertionError, match="op_brev"):
        compile_cpp(cpp, "-O0", tmp_path / "unknown.o")
