"""A wrapped module is still the user's module: copies, saves, other algorithms, its neighbours."""

import copy
import io
import subprocess
import sys

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua.torch_api import BaguaModule
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


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@training.with_group
def copy_and_train(how):
    model, optimizer = wrapped()
    training.train_on_ranks(model, optimizer, steps=1)
    twin = how(model)
    assert type(twin) is Perceptron
    assert not isinstance(twin, BaguaModule)
    assert training.bits(twin.parameters()) == training.bits(model.parameters())
    assert list(twin.state_dict()) == list(model.state_dict())
    shared = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert shared.isdisjoint(p.untyped_storage().data_ptr() for p in twin.parameters())
    calls, sent = model.calls, model.bagua_stats()["total"]["bytes_sent"]
    if dist.get_rank() == 1:  # a copy communicates nothing, so one rank may train it
        training.train(twin, training.sgd(twin), [training.batch(5, 1)])
        assert twin.calls == calls + 1
        assert training.bits(twin.parameters()) != training.bits(model.parameters())
    assert model.bagua_stats()["total"]["bytes_sent"] == sent
    training.train_on_ranks(model, optimizer, steps=2)
    assert model.calls == calls + 2
    twin_optimizer = training.sgd(twin)
    twin.with_bagua([twin_optimizer], GradientAllReduceAlgorithm())
    training.train_on_ranks(twin, twin_optimizer, steps=2)
    training.train_on_ranks(model, optimizer, steps=1)
    return isinstance(twin, BaguaModule), isinstance(model, BaguaModule)


HOW = pytest.mark.parametrize("how", [copy.deepcopy, saved_and_loaded], ids=["deepcopy", "saved"])


@HOW
def test_a_copy_is_an_ordinary_module_that_trains_alone_and_can_be_wrapped(ranks, how):
    assert ranks(3, copy_and_train, how) == [(True, True)] * 3


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
    assert model.calls == 6
    return rounds


def test_wrapping_again_changes_the_algorithm_and_broadcasts_again(ranks):
    expected = [
        (2, "GradientAllReduceAlgorithmImpl"),
        (2, "ByteGradAlgorithmImpl"),
        (2, "GradientAllReduceAlgorithmImpl"),
    ]
    assert ranks(3, change_the_algorithm) == [expected] * 3


@training.with_group
def train_two_models():
    first, second = training.network(seed=0), training.network(seed=1)
    alone = [copy.deepcopy(first), copy.deepcopy(second)]
    optimizers = [training.sgd(first), training.sgd(second)]
    first.with_bagua([optimizers[0]], GradientAllReduceAlgorithm())
    second.with_bagua([optimizers[1]], ByteGradAlgorithm(hierarchical=False, codec="fp16"))
    for step in range(3):
        # Forwards and backwards of both interleave.
        losses = [
            training.squared_error(m, training.batch(step, dist.get_rank()))
            for m in (first, second)
        ]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in reversed(losses):
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        training.assert_ranks_agree(first)
        training.assert_ranks_agree(second)
    training.assert_close(first, training.train_alone(alone[0], training.sgd(alone[0])))
    reference = training.train_alone(alone[1], training.sgd(alone[1]))
    training.assert_close(second, reference, rtol=1e-2, atol=1e-2)
    return True


def test_two_wrapped_models_train_in_one_process(ranks):
    assert all(ranks(3, train_two_models))


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
