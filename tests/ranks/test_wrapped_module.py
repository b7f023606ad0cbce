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


@training.with_group
def wrap_in_short():
    names = []
    for few in ([], ["optimizer"], ["optimizer", "bytegrad"], ["optimizer", "diloco"]):
        model = training.network()
        optimizer = training.sgd(model)
        bagua.wrap(model, *([optimizer] if few else []), *few[1:])
        training.train(model, optimizer, [training.batch(0, dist.get_rank())])
        names.append((type(model.bagua_algorithm).__name__, len(model.bagua_optimizers)))
    alone = training.network()
    return names, training.error_of(lambda: bagua.wrap(alone, algorithm="diloco"))


def test_a_wrap_takes_no_optimizer_one_without_a_list_and_a_name(ranks):
    for names, error in ranks(2, wrap_in_short):
        assert names == [
            ("AutoAlgorithmImpl", 0),
            ("AutoAlgorithmImpl", 1),
            ("ByteGradAlgorithmImpl", 1),
            ("DiLoCoAlgorithmImpl", 1),
        ]
        assert "counts the steps of the optimizers given to with_bagua: give it the one" in error
