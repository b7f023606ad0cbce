"""tools/cuda_report refuses what it says; the texts are excerpts of cuobjdump's output."""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "cuda_report"

RESOURCES = """
Fatbin elf code:
================
arch = sm_90

Resource usage:
 Common:
  GLOBAL:0
 Function encode_tiles:
  REG:78 STACK:{stack} SHARED:64 LOCAL:0 CONSTANT[0]:4208 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function decode_add_tiles:
  REG:96 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:4212 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
CODE = """
arch = sm_90
\t\tFunction : encode_tiles
        /*0100*/                   LDG.E.128 R4, desc[UR4][R2.64] ;   /* 0x0000000402047981 */
        /*0110*/              @!P0 LDG.E.U16 R8, desc[UR4][R2.64+0x10] ;
        /*0120*/                   STG.E.64 desc[UR4][R6.64], R10 ;
        /*0130*/                   STG.E desc[UR4][R6.64], R10 ;
\t\tFunction : decode_add_tiles
        /*0100*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0110*/                   STG.E.128 desc[UR4][R6.64], R12 ;
"""


@pytest.fixture(scope="module")
def report():
    loader = importlib.machinery.SourceFileLoader("cuda_report", str(TOOL))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("cuda_report", loader))
    loader.exec_module(module)
    return module


def read(report, code=CODE, stack=0):
    kernels = {}
    report.read_resources(RESOURCES.format(stack=stack), kernels)
    report.read_code(code, kernels)
    return {kernel.name: kernel for kernel in kernels.values()}


def test_registers_and_widths_are_read(report):
    kernels = read(report)
    encode = kernels["encode_tiles"]
    assert (encode.architecture, encode.registers, encode.shared) == ("sm_90", 78, 64)
    assert encode.loads == {128: 1, 16: 1}
    assert encode.stores == {64: 1, 32: 1}
    assert kernels["decode_add_tiles"].loads == {128: 1}
    assert [report.findings(kernel) for kernel in kernels.values()] == [[], []]


@pytest.mark.parametrize(
    ("kernel", "old", "new", "finding"),
    [
        ("encode_tiles", "LDG.E.128 R4", "LDG.E.64 R4", "its loads of elements are not 128 bits"),
        ("decode_add_tiles", "LDG.E.128.CONSTANT", "LDG.E", "its loads of elements are not 128"),
        ("decode_add_tiles", "STG.E.128", "STG.E.64", "its stores of elements are not 128 bits"),
        ("encode_tiles", "STG.E desc", "STL [R1], R2 ; STG.E desc", "spills: 1 accesses to local"),
    ],
)
def test_narrow_accesses_and_spills_are_found(report, kernel, old, new, finding):
    changed = read(report, CODE.replace(old, new))
    (found,) = report.findings(changed[kernel])
    assert finding in found


def test_a_stack_is_found(report):
    (found,) = report.findings(read(report, stack=16)["encode_tiles"])
    assert "16 B of stack" in found
