"""The CUDA kernels, run on the CPU. Every size and sanitizers: deep/test_kernel_sanitizers.py."""

import re

import pytest
from support.programs import kernel_emulation
from support.programs.kernel_emulation import run

pytestmark = kernel_emulation.marks


def test_kernels_give_the_bytes_of_the_cpu_codecs():
    dtypes = ["float32", "float16"]
    kernel_emulation.assert_kernels_give_the_bytes_of_the_cpu("plain", "--quick", dtypes=dtypes)


def test_the_emulation_runs_a_correct_kernel():
    result = run("plain", "emulation_faults", "correct")
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
