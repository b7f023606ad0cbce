"""What nvcc makes of the CUDA kernels, its PTX, run on the CPU beside the CPU codecs.

Each kernel's PTX becomes C++ (support/programs/ptx_to_cpp.py) and takes the place of the kernel
that g++ compiles, in the program of test_kernel_emulation.py.
"""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.programs import kernel_emulation, ptx_to_cpp
from support.programs.cpp_programs import ROOT, command, kept

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
#: The program as g++ compiles it, with the translations in place of the kernels.
PROGRAM = [*kernel_emulation.PROGRAMS["kernels"], *kernel_emulation.EMULATION]
PROGRAM += ["tests/cpp/ptx/translations.cpp"]
FILL = "csrc/comm/nccl/fill_if_set.cu"  # its kernel alone: the program launches that itself
KERNELS = [FILL, *(source for source in PROGRAM if source.endswith(".cu"))]
#: What the build gives nvcc, without what is for ptxas.
OF_BUILD = re.search(
    r"target_compile_options\(bagua_kernels PRIVATE (.*)\)", (ROOT / "cmake/cuda.cmake").read_text()
)[1].split()
OF_BUILD = [flag for flag in OF_BUILD if not flag.startswith("-Xptxas")]
OF_NVCC = ["-std=c++20", "-O3", *OF_BUILD, "-Icsrc", "-arch=compute_90", "-ptx"]
OF_TRANSLATIONS = "-O0 -g0 -w -fno-strict-aliasing"  # what one leaves unused is not a mistake

pytestmark = [
    pytest.mark.timeout(1800),  # the first run compiles
    pytest.mark.skipif(
        NVCC is None or shutil.which("g++") is None,
        reason="what nvcc makes of the kernels needs nvcc, and g++",
    ),
]


def compile_cpp(source, target, flags=OF_TRANSLATIONS):
    done = kernel_emulation.compile_object(source, flags, target)
    assert done.returncode == 0, f"{source}:\n{done.stderr[-4000:]}"


def translate(source, folder, change=lambda ptx: ptx):
    """PTX, then C++, then an object, of one file of kernels; its name in the table."""
    name = Path(source).stem
    ptx, cpp = folder / f"{name}.ptx", folder / f"{name}.ptx.cpp"
    command([NVCC, *OF_NVCC, source, "-o", ptx])
    cpp.write_text(ptx_to_cpp.translate(change(ptx.read_text()), name))
    compile_cpp(cpp, folder / f"{name}.ptx.o")
    return name


def link(objects, folder):
    # -rdynamic: a kernel's address tells its name.
    command(["g++", "-rdynamic", *objects, "-ldl", "-o", folder / "kernels"])
    return folder / "kernels"


def build(folder):
    flags, _ = kernel_emulation.VARIANTS["plain"]  # ccache may have these objects
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = [pool.submit(translate, source, folder) for source in KERNELS]
        objects = [
            pool.submit(compile_cpp, source, folder / f"{Path(source).name}.o", flags)
            for source in PROGRAM
        ]
        for job in objects:
            job.result()
        table = folder / "table.cpp"
        table.write_text(ptx_to_cpp.table([job.result() for job in names]))
    compile_cpp(table, folder / "table.o")
    link(folder.glob("*.o"), folder)


@pytest.fixture(scope="module")
def folder():
    files = (__file__, ptx_to_cpp.__file__, kernel_emulation.__file__)
    own = [Path(file).read_text() for file in files]
    return kept("ptx", build, *own, command([NVCC, "--version"]), folders=kernel_emulation.SOURCES)


def test_ptx_of_every_kernel_gives_the_bytes_of_the_cpu_codecs(folder):
    # Of every size the same sources run as g++ compiles them: test_kernel_emulation.py.
    run = [folder / "kernels", "--quick", "--every-dtype"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "all equal" in done.stdout
    ran, known, launches = map(
        int, re.search(r"PTX: (\d+) of (\d+) kernels ran, (\d+) launches", done.stdout).groups()
    )
    assert ran == known > 0, done.stdout[-4000:]
    assert launches > ran


def test_a_wrong_instruction_is_found(folder, tmp_path):
    def change(ptx):
        assert "setp.ge.s64" in ptx
        return ptx.replace("setp.ge.s64", "setp.gt.s64")

    name = f"{translate(FILL, tmp_path, change)}.ptx.o"
    objects = [tmp_path / name, *(file for file in folder.glob("*.o") if file.name != name)]
    run = [link(objects, tmp_path), "--races"]
    # Bytes that a wrong kernel writes may be those of the names that the program prints.
    done = subprocess.run(run, capture_output=True, text=True, errors="replace", timeout=600)
    assert done.returncode != 0
    assert re.search("fill_bytes_if_set, .* wrong", done.stdout), done.stdout[-2000:]


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
        compile_cpp(cpp, tmp_path / "unknown.o")
