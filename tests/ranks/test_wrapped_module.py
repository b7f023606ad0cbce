"""A wrapped module is still the user's module: other algorithms, and its neighbours.

Copies, saves and several models: situations/copies.py and several_models.py.
"""

import copy
import subprocess
import sys

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from support import training
from torch import nn


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(training.FEATURES, 7)
        self.head = nn.Linear(7, training.OUTPUTS)
        self.calls = 0
        self.register_forward_hook(count_calls)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


def count_calls(module, inputs, output):
    module.calls += 1


def wrapped(algorithm="exact"):
    model = Perceptron()
    optimizer = training.sgd(model)
    return model.with_bagua([optimizer], training.algorithm(algorithm)), optimizer


@training.with_group
def change_the_algorithm():
    model, optimizer = wrapped()
    rounds = []
    for algorithm in (
        GradientAllReduceAlgorithm(),
        ByteGradAlgorithm(hierarchical=False),
        GradientAllReduceAlgorithm(average=False),
    ):
        with torch.no_grad():
            model.head.bias += dist.get_rank()
        model.with_bagua([optimizer], algorithm)
        assert len(set(training.gather(training.bits(model.parameters())))) == 1
        training.train_on_ranks(model, optimizer, steps=2)
        rounds.append((model.bagua_stats()["rounds"], type(model.bagua_algorithm).__name__))
    twin = copy.deepcopy(model)
    twin(training.batch(0, 0)[0])
    assert (model.calls, twin.calls) == (6, 7), "hooks of the user stay, and go with copies"
    return rounds


def test_wrapping_again_changes_the_algorithm_and_broadcasts_again(ranks):
    expected = [
        (2, "GradientAllReduceAlgorithmImpl"),
        (2, "ByteGradAlgorithmImpl"),
        (2, "GradientAllReduceAlgorithmImpl"),
    ]
    assert ranks(3, change_the_algorithm) == [expected] * 3


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
