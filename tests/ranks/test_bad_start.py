"""Starting wrongly: twice, with half an environment, with a foreign torch."""

import os
import subprocess
import sys

import bagua
import bagua.torch_api as api
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import faults
from support.processes.pool import run_script


@faults.with_bagua_group
def initialise_again():
    return faults.error_of(api.init_process_group)


def test_initialising_twice_says_so(ranks):
    for error in ranks(2, initialise_again):
        assert error.startswith("RuntimeError: bagua.init_process_group was called already")
        assert "bagua.destroy_process_group() first" in error


def initialise_with(options):
    try:
        return faults.error_of(api.init_process_group, **options)
    finally:
        api.destroy_process_group()


def test_arguments_beside_an_initialised_torch_distributed_are_refused(ranks):
    for error in ranks(2, initialise_with, {"backend": "gloo"}):
        assert error.startswith("RuntimeError: torch.distributed is initialised already")


def initialise_again_after_destroying():
    rounds = []
    for _ in range(3):
        api.init_process_group()
        api.communication.new_group([0])
        model, optimizer = faults.wrapped()
        faults.step(model, optimizer)
        rounds.append(model.bagua_stats()["rounds"])
        api.destroy_process_group()
    return rounds, dist.is_initialized()


def test_a_destroyed_group_can_be_made_again(ranks):
    ranks(1, initialise_again_after_destroying, init=False)  # one process has done more than others
    assert ranks(2, initialise_again_after_destroying, init=False) == [([1, 1, 1], False)] * 2
    assert ranks(2, initialise_again_after_destroying) == [([1, 1, 1], True)] * 2


@faults.with_bagua_group
def wrap_twice_on_a_torch_group(same):
    rounds = []
    group = None
    for _ in range(3):
        group = group if same and group else dist.new_group([0, 1])
        model = faults.network()
        model.with_bagua([], GradientAllReduceAlgorithm(), process_group=group)
        faults.loss_of(model).backward()
        rounds.append(model.bagua_stats()["rounds"])
    return rounds


@pytest.mark.parametrize("same", [True, False], ids=["same-group", "equal-groups"])
def test_several_models_may_use_one_torch_group(ranks, same):
    assert ranks(2, wrap_twice_on_a_torch_group, same) == [[1, 1, 1]] * 2


def initialise_without(names):
    for name in names:
        del os.environ[name]
    return initialise_with({})


@pytest.mark.parametrize(
    "names",
    [["MASTER_PORT"], ["RANK"], ["WORLD_SIZE", "MASTER_ADDR"]],
    ids=["master-port", "rank", "world-size-and-master"],
)
def test_missing_variables_are_listed(ranks, names):
    for error in ranks(1, initialise_without, names, init=False):
        assert error.startswith(f"ValueError: environment variable(s) {', '.join(names)} not set")
        assert "torchrun --nproc_per_node=N script.py" in error


def test_a_store_needs_rank_and_sizes(ranks):
    (error,) = ranks(1, initialise_with_a_store, init=False)
    assert error.startswith(
        "ValueError: init_process_group(store=...) needs 0 <= rank < world_size"
    )
    assert "rank=-1" in error


def initialise_with_a_store():
    return initialise_with({"store": dist.HashStore()})


def initialise_with_a_backend_first():
    return initialise_with({"store": "gloo"})


def test_a_backend_in_the_place_of_the_store_is_told_its_name(ranks):
    (error,) = ranks(1, initialise_with_a_backend_first, init=False)
    assert error.startswith("TypeError: init_process_group(store='gloo')")
    assert "init_process_group(backend=...)" in error


@faults.with_bagua_group
def wrap_with_bucket_size(value):
    os.environ["BAGUA_DEFAULT_BUCKET_SIZE"] = value
    return faults.error_of(faults.wrapped)


@pytest.mark.parametrize("value", ["0", "-5", "ten"])
def test_a_bucket_size_that_is_no_positive_number_is_refused(ranks, value):
    (error,) = ranks(1, wrap_with_bucket_size, value)
    assert error.startswith("ValueError")
    assert "BAGUA_DEFAULT_BUCKET_SIZE" in error
    assert value in error


@faults.with_bagua_group
def group_of(members):
    return faults.error_of(api.communication.new_group, members)


@pytest.mark.parametrize("members", [[0, 2], [], [1, 1], [-1]], ids=str)
def test_impossible_groups_are_refused(ranks, members):
    for error in ranks(2, group_of, members):
        assert error.startswith("ValueError: new_group: rank")


def test_another_release_of_torch_is_refused_with_both_versions_and_the_remedy():
    with pytest.raises(ImportError) as caught:
        bagua._check_torch("2.12.1+cpu", "2.13.0+cu130")
    text = str(caught.value)
    assert "built for torch 2.13.0+cu130, but torch 2.12.1+cpu is installed" in text
    assert text.endswith("pip install --force-reinstall --no-deps --no-build-isolation .")
    bagua._check_torch("2.13.1+cpu", "2.13.0+cu130")


def test_the_check_comes_before_the_extension_is_loaded(tmp_path):
    """A foreign torch would end the import with an undefined symbol instead."""
    source = (
        "import sys, torch\n"
        "torch.__version__ = '2.5.0'\n"
        "try:\n    import bagua\n"
        "except ImportError as error:\n"
        "    print(error, 'bagua._C' in sys.modules)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    end = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert f"built for torch {torch.__version__.split('+')[0]}" in end.stdout, end.stderr
    assert "torch 2.5.0 is installed" in end.stdout
    assert end.stdout.strip().endswith("False")


MODELS_DIFFER = """
import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm

bagua.init_process_group()
bagua.destroy_process_group()
bagua.init_process_group()
net = torch.nn.Linear(4, 4 + bagua.get_rank())
net.with_bagua([], GradientAllReduceAlgorithm())
"""


def test_an_error_of_a_rank_is_its_last_line_and_short(tmp_path):
    script = tmp_path / "models_differ.py"
    script.write_text(MODELS_DIFFER)
    for rank, done in enumerate(run_script(2, script)):
        lines = done.stderr.splitlines()
        assert done.returncode == 1
        assert lines[-1].startswith(
            f"bagua: rank {rank}: BaguaMismatchError: ranks differ in the model or the arguments "
            "of with_bagua. First difference: rank 0 has [parameter weight: (4, 4)"
        )
        assert len(lines[-1]) < 360
        assert sum(line.startswith("bagua: rank") for line in lines) == 1
