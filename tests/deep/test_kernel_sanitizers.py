"""The CUDA kernels on the CPU under AddressSanitizer and ThreadSanitizer, and of every size.

Of few sizes: tests/single/test_kernel_emulation.py.
"""

import pytest
from support.programs import kernel_emulation
from support.programs.kernel_emulation import run

pytestmark = kernel_emulation.marks
#: Addresses and barriers depend on the width of the elements, and bfloat16's is float16's.
WIDTHS = ["float32", "float16"]


def test_kernels_give_the_bytes_of_the_cpu_codecs_at_every_size():
    dtypes = ["float32", "float16", "bfloat16"]
    kernel_emulation.assert_kernels_give_the_bytes_of_the_cpu("plain", dtypes=dtypes)


@pytest.mark.parametrize(("variant", "extent"), [("address", "--quick"), ("thread", "--races")])
def test_kernels_give_the_bytes_of_the_cpu_codecs(variant, extent):
    kernel_emulation.assert_kernels_give_the_bytes_of_the_cpu(variant, extent, dtypes=WIDTHS)


def test_a_missing_barrier_in_the_kernels_is_found_as_a_race():
    result = run("thread", "kernels", "--races", "--skip-barrier", "1")
    assert result.returncode != 0
    assert "data race" in result.stderr
    # The barrier that each kernel comes to first is left out, so the race is in the first of them.
    assert "fill_if_set.cuh:" in result.stderr


@pytest.mark.parametrize("variant", ["address", "thread"])
def test_the_emulation_runs_a_correct_kernel(variant):
    result = run(variant, "emulation_faults", "correct")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "fault",
    ["missing_barrier", "race_between_barriers", "warp_barrier_for_all", "shuffle_as_fence"],
)
def test_memory_without_a_barrier_is_a_race_whatever_the_order(fault):
    assert run("plain", "emulation_faults", fault).returncode == 0
    result = run("thread", "emulation_faults", fault)
    assert result.returncode != 0
    assert "data race" in result.stderr
    assert "emulation_faults.cpp:" in result.stderr


def test_address_sanitizer_reports_a_misaligned_access_too():
    result = run("address", "emulation_faults", "misaligned_load")
    assert result.returncode != 0
    assert "misaligned address" in result.stderr
