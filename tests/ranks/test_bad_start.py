"""Starting wrongly: twice, with half an environment, with a foreign torch."""

import os
from datetime import timedelta
from unittest import mock

import bagua
import bagua.torch_api as api
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import faults
from support.cases import over


def initialise_again():
    beside_torch = faults.error_of(api.init_process_group, backend="gloo")
    api.init_process_group()
    twice = faults.error_of(api.init_process_group)
    api.destroy_process_group()
    return beside_torch, twice


def test_initialising_twice_or_with_arguments_beside_torch_is_refused(ranks):
    for beside_torch, twice in ranks(2, initialise_again):
        assert beside_torch.startswith("RuntimeError: torch.distributed is initialised already")
        assert twice.startswith("RuntimeError: bagua.init_process_group was called already")
        assert "bagua.destroy_process_group() first" in twice


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


@over(same=[True, False])
def test_several_models_may_use_one_torch_group(ranks, same):
    assert ranks(2, wrap_twice_on_a_torch_group, same) == [[1, 1, 1]] * 2


def missing(*names):
    """Variables that are not set, no arguments, and the error."""
    said = f"ValueError: environment variable(s) {', '.join(names)} not set"
    return names, dict, said, "torchrun --nproc_per_node=N script.py"


STARTS = [
    missing("MASTER_PORT"),
    missing("RANK"),
    missing("WORLD_SIZE", "MASTER_ADDR"),
    (
        (),
        lambda: {"store": dist.HashStore()},
        "ValueError: init_process_group(store=...) needs 0 <= rank < world_size",
        "rank=-1",
    ),
    (
        (),
        lambda: {"store": "gloo"},
        "TypeError: init_process_group(store='gloo')",
        "init_process_group(backend=...)",
    ),
    *(
        (
            (),
            lambda timeout=timeout: {"timeout": timeout},
            "ValueError: init_process_group(timeout=datetime.timedelta(",
            "take timedelta(days=30)",
        )
        for timeout in (timedelta.max, timedelta(0), timedelta(seconds=-1))
    ),
]


def start_wrongly():
    for names, arguments, said, remedy in STARTS:
        with mock.patch.dict(os.environ):
            for name in names:
                del os.environ[name]
            error = faults.error_of(api.init_process_group, **arguments())
        assert error.startswith(said)
        assert remedy in error


def test_missing_variables_and_impossible_stores_are_named(ranks):
    ranks(1, start_wrongly, init=False)


@faults.with_bagua_group
def impossible_groups():
    for members in ([0, 2], [], [1, 1], [-1]):
        error = faults.error_of(api.communication.new_group, members)
        assert error.startswith("ValueError: new_group: rank"), members


def test_impossible_groups_are_refused(ranks):
    ranks(2, impossible_groups)


FOREIGN_TORCH = """
import sys, torch
torch.__version__ = "2.5.0"
try:
    import bagua
except ImportError as error:
    print(error, "bagua._C" in sys.modules)
"""


def test_another_release_of_torch_is_refused_before_the_extension_is_loaded(run_script):
    """It would end the import with an undefined symbol instead."""
    (end,) = run_script(1, FOREIGN_TORCH, anew=True)
    built_for = torch.__version__.split("+")[0]
    assert f"built for torch {built_for}" in end.stdout, end.stderr
    assert "but torch 2.5.0 is installed" in end.stdout
    remedy = "pip install --force-reinstall --no-deps --no-build-isolation ."
    assert end.stdout.strip().endswith(f"{remedy} False")
    bagua._check_torch("2.13.1+cpu", "2.13.0+cu130")


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


def test_an_error_of_a_rank_is_its_last_line_and_short(run_script):
    for rank, done in enumerate(run_script(2, MODELS_DIFFER)):
        lines = done.stderr.splitlines()
        assert done.returncode == 1
        assert lines[-1].startswith(
            f"bagua: rank {rank}: BaguaMismatchError: ranks differ in the model or the arguments "
            "of bagua.wrap. First difference: rank 0 has [parameter weight: (4, 4)"
        )
        assert len(lines[-1]) < 360
        assert sum(line.startswith("bagua: rank") for line in lines) == 1
