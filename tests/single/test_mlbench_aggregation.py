"""The base of the eager door without other ranks: what is seen, written where, and imported."""

import subprocess
import sys

import pytest
import torch
from mlbench_core.aggregation.pytorch.aggregation import Aggregation, canonical_op
from mlbench_core.aggregation.pytorch.centralized import (
    ALLREDUCE_AGGREGATION_OPS,
    AVG_CUSTOM,
    AVG_WORLD,
    AllReduceAggregation,
)
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from support.eager_models import (
    Doubled,
    Mixed,
    assert_unchanged,
    bits,
    by_layer_and_by_model,
    snapshot,
    with_gradients,
)
from torch import nn

WITHOUT_OTHERS = """
import sys
import torch.distributed
from mlbench_core.aggregation.pytorch import aggregation, centralized, decentralized
assert not torch.distributed.is_initialized()
foreign = {"horovod", "kubernetes", "sklearn", "tensorpack", "matplotlib"} & set(sys.modules)
print("imported", sorted(foreign))
"""


def test_importing_needs_torch_and_no_group():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OTHERS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "imported []\n"


def test_documented_names_of_operations_mean_the_same():
    assert canonical_op("avg") == canonical_op("avg_world") == AVG_WORLD
    assert canonical_op("custom_avg") == canonical_op("avg_custom") == AVG_CUSTOM
    assert (AVG_WORLD, AVG_CUSTOM) == ("avg_world", "avg_custom")
    assert {AVG_WORLD, AVG_CUSTOM, "sum", "min", "max"} == set(ALLREDUCE_AGGREGATION_OPS)
    with pytest.raises(NotImplementedError, match="op='mean' is not known; there are avg_world,"):
        canonical_op("mean")


def test_the_base_is_abstract():
    with pytest.raises(TypeError, match="_agg"):
        Aggregation()


@pytest.mark.parametrize("by_layer", [False, True], ids=["by-model", "by-layer"])
def test_alone_every_bit_stays(by_layer):
    model = with_gradients(Mixed())
    before = snapshot(model)
    everything = AllReduceAggregation(1)
    everything.agg_model(by_layer)(model, "avg_world")
    everything.agg_grad(by_layer)(model, op="sum")
    DecentralizedAggregation(0, []).agg_model(by_layer)(model, "avg_world")
    assert_unchanged(model, before)


@pytest.mark.parametrize("kind", ["gradient", "weight"])
@pytest.mark.parametrize("by_layer", [False, True], ids=["by-model", "by-layer"])
def test_a_subclass_sees_every_tensor_once_and_its_results_are_written_in_place(by_layer, kind):
    model = with_gradients(Mixed())
    doubled = Doubled()
    names = [name for name, _ in model.named_parameters()]
    targets = {n: p.grad if kind == "gradient" else p for n, p in model.named_parameters()}
    before = {n: (t.data_ptr(), t.stride(), t.detach().clone()) for n, t in targets.items()}
    function = doubled.agg_grad(by_layer) if kind == "gradient" else doubled.agg_model(by_layer)
    assert function(model, "mine", 5) is None
    for name, (pointer, stride, value) in before.items():
        assert targets[name].data_ptr() == pointer, name
        assert targets[name].stride() == stride, name
        assert torch.equal(bits(targets[name]), bits(2 * value)), name
    assert "tied" not in names, "tied parameters are one"
    shapes = [shape for shape, *_ in doubled.seen]
    if by_layer:
        not_empty = [targets[n].shape for n in names if targets[n].numel() > 0]
        assert sorted(map(tuple, shapes)) == sorted(map(tuple, not_empty))
    else:
        assert sorted(shapes) == [(7,), (15,), (4 * 3 * 2 * 2 + 1 + 24 + 8 + 4,)]
    assert {seen[2:] for seen in doubled.seen} == {("mine", 5)}


def test_a_result_that_shares_memory_with_an_earlier_one_is_kept():
    class OneBuffer(Aggregation):
        memory = torch.zeros(100)

        def _agg(self, data, op, denom=None):
            result = self.memory[: data.numel()].view(data.shape)
            return result.copy_(data + 1)

    model = nn.Linear(3, 2)
    expected = [p.detach() + 1 for p in model.parameters()]
    OneBuffer().agg_model(by_layer=True)(model, "x")
    for p, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.detach(), value)


@pytest.mark.parametrize("by_layer", [False, True], ids=["by-model", "by-layer"])
def test_a_result_may_be_a_view_in_another_order_or_of_another_dtype(by_layer):
    class Backwards(Aggregation):
        def _agg(self, data, op, denom=None):
            return data.view(-1).flip(0).double() if op == "double" else data.view(-1)

    model = nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    Backwards().agg_model(by_layer)(model, "same")
    assert torch.equal(model.weight.detach(), before)
    Backwards().agg_model(by_layer)(model, "double")
    assert torch.equal(model.weight.detach(), before.view(-1).flip(0).view(2, 3))


def test_an_invalid_result_is_refused_and_nothing_changes():
    class Nothing(Doubled):
        def _agg(self, data, op, denom=None):
            return None

    class Short(Doubled):
        def _agg(self, data, op, denom=None):
            return data.view(-1)[1:]

    model = with_gradients(Mixed())
    before = snapshot(model)
    for wrong, text in ((Nothing(), "it returned a NoneType"), (Short(), "it returned one of")):
        for function in by_layer_and_by_model(wrong.agg_grad):
            with pytest.raises(TypeError, match=text):
                function(model, "x")
    assert_unchanged(model, before)


@pytest.mark.parametrize("make", [nn.ReLU, nn.Sequential, lambda: nn.BatchNorm1d(0)])
def test_a_model_without_numbers_is_aggregated_to_nothing(make):
    model = make()
    doubled = Doubled()
    for function in [*by_layer_and_by_model(doubled.agg_model), doubled.agg_grad()]:
        function(model, "x")
    assert doubled.seen == []


def test_autograd_knows_of_the_change_and_gets_no_graph_from_it():
    model = nn.Linear(2, 2)
    loss = model(torch.ones(1, 2)).pow(2).sum()
    Doubled().agg_model()(model, "x")
    assert all(p.grad_fn is None and p.requires_grad for p in model.parameters())
    loss = (model.weight * model.weight).sum()
    Doubled().agg_model()(model, "x")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
