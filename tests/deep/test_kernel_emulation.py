"""The CUDA kernels, run on the CPU: of every size, under AddressSanitizer and ThreadSanitizer."""

import re

import pytest
from bagua import _C
from support.programs import kernel_emulation
from support.programs.kernel_emulation import run

pytestmark = kernel_emulation.marks
#: Addresses and barriers depend on the width of the elements, and bfloat16's is float16's.
WIDTHS = ["float32", "float16"]


@pytest.mark.parametrize(
    ("variant", "extent", "dtypes"),
    [
        ("plain", [], [*WIDTHS, "bfloat16"]),  # of every size
        ("address", ["--quick"], WIDTHS),
        ("thread", ["--races"], WIDTHS),
    ],
)
def test_kernels_give_the_bytes_of_the_cpu_codecs(variant, extent, dtypes):
    result = run(variant, "kernels", *extent)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[:4000]
    lines = result.stdout.splitlines()
    assert lines[-1] == "all equal"
    for codec in _C.codec_names():
        for dtype in dtypes:
            assert any(line.startswith(f"{codec}, {dtype}: ") for line in lines)


def test_a_missing_barrier_in_the_kernels_is_found_as_a_race():
    result = run("thread", "kernels", "--races", "--skip-barrier", "1")
    assert result.returncode != 0
    assert "data race" in result.stderr
    # The barrier that each kernel comes to first is left out, so the race is in the first of them.
    assert "fill_if_set.cuh:" in result.stderr


@pytest.mark.parametrize("variant", ["plain", "address", "thread"])
def test_the_emulation_runs_a_correct_kernel(variant):
    result = run(variant, "emulation_faults", "correct")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("check", ["random_shared_memory", "random_order"])
def test_each_cta_comes_in_its_turn_by_chance_and_finds_random_words(check):
    assert run("plain", "emulation_faults", check).returncode == 0


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
def test_undefined_behaviour_of_a_gpu_ends_the_program(fault, message):
    result = run("plain", "emulation_faults", fault)
    assert result.returncode == 3, result.stdout + result.stderr
    assert re.search(message, result.stderr), result.stderr


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
