"""BaguaStrategy in processes of its own: which package it imports, and ranks of a notebook."""

import sys
from pathlib import Path

import pytest
import torch
from support.processes.pool import run_without_torchrun

CHILDREN = Path(__file__).parents[2] / "integrations/lightning_children.py"
IMPORTS = """
import logging, sys
import {first}
import {first}.utilities.rank_zero as messages
logger = messages.rank_zero_module.log.name
from bagua.lightning import BaguaFabricStrategy, BaguaStrategy, strategies
assert messages.rank_zero_module.log.name == logger, messages.rank_zero_module.log.name
assert {other!r} not in sys.modules
assert BaguaStrategy is strategies[{package!r}]
assert issubclass(BaguaStrategy, {first}.strategies.DDPStrategy)
assert not issubclass(strategies[{other!r}], {first}.strategies.DDPStrategy)
assert {other!r} in sys.modules
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("package", "other"), [("lightning", "pytorch_lightning"), ("pytorch_lightning", "lightning")]
)
def test_the_package_in_use_is_the_only_one_that_is_imported(package, other):
    """Each takes the messages of both into its own logger."""
    first = "lightning.pytorch" if package == "lightning" else package
    program = IMPORTS.format(first=first, package=package, other=other)
    end = run_without_torchrun([sys.executable, "-c", program])
    assert end.returncode == 0, end.stderr


def saved_by_children(path):
    from integrations import lightning_children

    lightning_children.trained(path)


@pytest.mark.timeout(240)
def test_residuals_of_forked_and_spawned_ranks_reach_the_checkpoint(ranks, tmp_path):
    """Lightning starts them as in a notebook; the process that saves is none of the ranks."""
    ranks(2, saved_by_children, str(tmp_path / "popen.ckpt"))
    end = run_without_torchrun([sys.executable, CHILDREN, str(tmp_path)])
    assert end.returncode == 0, end.stderr
    states = [
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["bagua"]
        for name in ("popen", "fork", "spawn")
    ]
    assert {key.split("/")[0] for key in states[0]} >= {"rank0", "rank1"}
    plain = [
        {key: v.tolist() if isinstance(v, torch.Tensor) else v for key, v in state.items()}
        for state in states
    ]
    assert plain[0] == plain[1] == plain[2]
