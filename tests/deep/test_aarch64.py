"""Codecs and the maths of messages on aarch64, under qemu: the values and bytes of this machine."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from support.programs.cpp_programs import ROOT, kept

CROSS = next(filter(shutil.which, ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-g++-12")), None)
# Those of bagua_codec in CMakeLists.txt.
FLAGS = ["-std=c++20", "-Icsrc", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

pytestmark = [
    pytest.mark.timeout(600),  # the first run compiles
    pytest.mark.skipif(
        platform.machine() == "aarch64" or CROSS is None or shutil.which("qemu-aarch64") is None,
        reason="aarch64 is not tried: g++-aarch64-linux-gnu or qemu-user (of Debian) is missing",
    ),
]


def build(folder):
    """The program for this machine, for aarch64, and for it with fused products."""
    fused = ROOT / "csrc" / "math" / "thin_factors.cpp"
    sources = ["tests/cpp/portable/portable.cpp", *(ROOT / "csrc").glob("codec/*.cpp")]
    sources += [file for file in (ROOT / "csrc").glob("math/*.cpp") if file != fused]
    here, there = ["g++", *FLAGS, "-O1"], [CROSS, *FLAGS, "-O3", "-static"]
    rest = folder / "rest.o"
    run(*there, "-r", *sources, "-o", rest)
    run(*there, rest, fused, "-o", folder / "there")
    run(*there, "-ffp-contract=fast", rest, fused, "-o", folder / "fused")
    run(*here, *sources, fused, "-o", folder / "here")


def run(*command):
    subprocess.run(command, cwd=ROOT, check=True)


def lines_of(program, *emulator):
    output = subprocess.check_output([*emulator, program], text=True, timeout=120)
    return dict(line.rsplit(" ", 1) for line in output.splitlines())


def test_every_byte_is_that_of_this_machine_and_a_fused_product_is_seen():
    programs = kept("aarch64", build, Path(__file__).read_text())
    here = lines_of(programs / "here")
    there = lines_of(programs / "there", "qemu-aarch64")
    assert len(here) > 30
    assert there == here
    fused = lines_of(programs / "fused", "qemu-aarch64")
    different = {name for name in here if fused[name] != here[name]}
    assert different == {"low rank f32", "low rank f64"}
