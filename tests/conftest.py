"""Makes the folders of tests/ importable, and says what becomes of tests that need a GPU."""

import gc
import os
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
#: Folders whose tests run only where they are named, as `make test-deep` does.
DEEP = [Path(TESTS, "deep"), Path(TESTS, "integrations")]


#: Files of 25 seconds and more, the longest first: begun last, they would keep one worker busy
#: alone.
LONG = [
    "deep/test_kernel_emulation.py",
    "deep/test_kernels_of_ptx.py",
    "deep/test_device_work.py",
    "deep/test_doctor.py",
    "deep/test_elastic_jobs.py",
    "deep/test_random_faults.py",
    "deep/test_mailbox_s3.py",
    "deep/test_fsdp_example.py",
    "deep/test_mutations.py",
    "deep/test_compiled_ways.py",
    "deep/test_aarch64.py",
    "deep/test_island_example.py",
    "deep/test_torch_ddp_suite.py",
    "deep/test_model.py",
    "integrations/test_lightning.py",
    "integrations/test_adapters.py",
    "integrations/test_engines.py",
    "deep/test_launchers.py",
    "integrations/test_optimizers.py",
    "deep/integrations/test_integration_examples.py",
    "deep/integrations/test_lightning_processes.py",
    "deep/test_top.py",
    "deep/test_hard_times.py",
    "deep/test_nccl_watchdog.py",
    "deep/test_island_jobs.py",
    "deep/test_shared_memory_damage.py",
    "ranks/situations/test_situations.py",
    "ranks/test_checkpoint.py",
    "ranks/test_situations_of_algorithms.py",
    "ranks/test_exit.py",
    "ranks/test_lost_ranks.py",
    "ranks/test_compile.py",
    "ranks/test_interrupts.py",
    "ranks/test_islands.py",
    "ranks/test_compressed_training.py",
    "ranks/test_fsdp_failures.py",
    "ranks/test_comm_hook_failures.py",
    "ranks/test_guard.py",
    "ranks/test_weights_sample.py",
]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Orders files for `-n`, which deals them out as they come with --no-loadscope-reorder."""
    places = {str(Path(TESTS, name)): place for place, name in enumerate(LONG)}
    assert all(map(os.path.exists, places)), "LONG names a file that is gone"
    items.sort(key=lambda item: places.get(str(item.path), len(LONG)))


def pytest_collection_finish():
    """Keeps the collected tests, of which there are thousands, out of every garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Without CUDA a test marked needs_cuda is skipped; with FAIL_WITHOUT_CUDA=1 it fails."""
    if item.get_closest_marker("needs_cuda") is None:
        return
    from support.devices import missing_for_cuda

    reason = missing_for_cuda()
    if reason and os.environ.get("FAIL_WITHOUT_CUDA") == "1":
        pytest.fail(f"needs CUDA: {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)


def pytest_ignore_collect(collection_path, config):
    """Nothing of the folders in DEEP, unless an argument is of one."""
    if collection_path not in DEEP:
        return None
    start = config.invocation_params.dir
    asked = [Path(start, argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(collection_path.resolve()) for path in asked) else True
