"""A wrapped module is still the user's module, and its neighbours are not touched.

Copies, saves and several models: situations/copies.py and several_models.py.
"""

import subprocess
import sys

import bagua.torch_api as bagua
import torch.distributed as dist
from bagua.torch_api.algorithms import GradientAllReduceAlgorithm
from support import training

NOTHING_BUT_WITH_BAGUA = """
import torch
before = set(dir(torch.nn.Module)), set(dir(torch.nn.Linear(1, 1))), set(vars(torch.nn.Module))
import bagua.torch_api
after = set(dir(torch.nn.Module)), set(dir(torch.nn.Linear(1, 1))), set(vars(torch.nn.Module))
print([sorted(new - old) for old, new in zip(before, after)])
print(type(torch.nn.Linear(1, 1)).__mro__[:2] == (torch.nn.Linear, torch.nn.Module))
"""


def test_unwrapped_modules_gain_nothing_but_with_bagua():
    done = subprocess.run(
        [sys.executable, "-c", NOTHING_BUT_WITH_BAGUA], capture_output=True, text=True, check=True
    )
    gained, ordinary = done.stdout.splitlines()
    assert gained == "[['with_bagua'], ['with_bagua'], ['with_bagua']]"
    assert ordinary == "True"


def wrap_over_torchs_group():
    """The pool has made torch's."""
    model = training.network(seed=dist.get_rank())
    wrapped = bagua.wrap(model, [training.sgd(model)])
    assert wrapped is model
    assert isinstance(wrapped, bagua.BaguaModule)
    training.squared_error(wrapped, training.batch(0, dist.get_rank())).backward()
    training.assert_ranks_agree(wrapped)
    name = type(wrapped.bagua_algorithm).__name__
    wrapped.with_bagua([], GradientAllReduceAlgorithm())
    bagua.destroy_process_group()
    return name


def test_torchs_group_is_enough_and_auto_is_the_default(ranks):
    assert ranks(2, wrap_over_torchs_group) == ["AutoAlgorithmImpl"] * 2
