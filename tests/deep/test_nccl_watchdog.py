"""The watchdog of NcclCommunicator on a fake CUDA: each case in a process of its own."""

from pathlib import Path

import pytest
import torch
from bagua import _C
from support.processes.pool import run_script

PROGRAM = Path(__file__).parents[1] / "support/programs/watchdog_cases.py"

pytestmark = [
    pytest.mark.skipif(not _C.has_nccl, reason="this build has no nccl.h"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has a CUDA of its own"),
]


def exit_code_of(case):
    (done,) = run_script(1, PROGRAM, [case], timeout=110)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "case",
    [
        "calls_run_on_the_current_stream_and_their_events_are_freed",
        "work_that_does_not_end_on_the_device_aborts_at_the_timeout",
        "work_behind_a_long_kernel_of_the_caller_is_not_late",
        "a_failure_ends_a_communicator_whose_device_cannot_be_set",
        "an_error_that_nccl_reports_about_work_on_the_device_aborts_at_once",
        "an_error_of_the_device_is_kept",
        "abort_with_work_on_the_device_is_quick_and_so_is_dropping",
        "a_forked_child_leaves_the_communicator_to_its_parent",
        "a_transport_connects_cuda_tensors_through_nccl",
        "a_rank_may_have_several_devices",
        "ranks_that_share_a_gpu_are_told_to_set_their_device",
    ],
)
def test_on_a_fake_device(case):
    code, stderr = exit_code_of(case)
    assert code == 0, stderr


def test_on_a_fake_device_a_process_may_end_with_work_in_flight():
    code, stderr = exit_code_of("a_process_may_end_with_communicators_and_work_in_flight")
    assert code == 3, stderr
