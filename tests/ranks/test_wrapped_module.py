"""A wrapped module is still the user's module, and its neighbours are not touched.

Copies, saves and several models: situations/copies.py and several_models.py.
"""

import subprocess
import sys

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua import BaguaError
from bagua.torch_api._session import Session, is_owned
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from bagua.torch_api.data_parallel import DistributedDataParallel
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
        assert "counts the steps of the optimizers given to bagua.wrap: give it the one" in error


def backward(model, step=0):
    model.zero_grad()
    training.squared_error(model, training.batch(step, dist.get_rank())).backward()
    training.assert_ranks_agree(model)


def hooks_of(model, *optimizers):
    tables = [model._forward_pre_hooks, model._forward_hooks, model._state_dict_pre_hooks]
    tables += [optimizer._optimizer_step_post_hooks for optimizer in optimizers]
    return [dict(table) for table in tables]


def fails(monkeypatch, stage):
    def fail(self, *_, **__):
        raise ArithmeticError(stage)

    monkeypatch.setattr(Session, stage, fail)


STAGES = ["_claim_parameters", "_give_initial_state", "_make_buckets", "_watch_steps"]


@training.with_group
def failed_wraps():
    """A module is as it was after a first wrap that failed, and refuses after a second one."""
    model = training.network()
    optimizer = training.sgd(model)
    gradient = model[0].weight.grad = torch.ones_like(model[0].weight)
    before = type(model), hooks_of(model, optimizer)
    for stage in STAGES:
        for algorithm in (ByteGradAlgorithm(), DecentralizedAlgorithm()):
            with pytest.MonkeyPatch.context() as patch:
                fails(patch, stage)
                with pytest.raises(ArithmeticError, match=stage) as caught:
                    model.with_bagua([optimizer], algorithm)
                with pytest.raises(ArithmeticError, match=stage):
                    DistributedDataParallel(model, algorithm=algorithm)
            assert (type(model), hooks_of(model, optimizer)) == before
            assert model[0].weight.grad is gradient
            assert not is_owned(model[0].weight), caught.value  # which holds the frames
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    for wrong in (QAdamAlgorithm(QAdamOptimizer(model.parameters())), DiLoCoAlgorithm()):
        with pytest.raises((TypeError, ValueError), match="optimizer"):
            model.with_bagua([], wrong)
        with pytest.raises(BaguaError, match="to replace its algorithm failed, so it would train"):
            backward(model)
    model.train().with_bagua([optimizer], GradientAllReduceAlgorithm())
    backward(model)


def test_a_wrap_that_fails_leaves_the_module_or_has_it_refuse_to_train(ranks):
    ranks(2, failed_wraps)


class Slotted(torch.nn.Linear):
    def __setattr__(self, name, value):
        if name == "__class__":
            raise AttributeError("frozen")
        super().__setattr__(name, value)


@training.with_group
def fixed_classes():
    scripted = torch.jit.script(torch.nn.Linear(2, 2))
    for model, words in ((scripted, "ScriptModule"), (Slotted(2, 2), "frozen.*contains it")):
        before = type(model), hooks_of(model)
        with pytest.raises(TypeError, match=words):
            model.with_bagua([training.sgd(model)], GradientAllReduceAlgorithm())
        assert (type(model), hooks_of(model)) == before
        assert not is_owned(next(model.parameters()))


def test_a_module_whose_class_is_fixed_is_refused_before_anything_has_changed(ranks):
    ranks(2, fixed_classes)
