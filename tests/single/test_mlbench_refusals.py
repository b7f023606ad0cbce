"""Refusals of mlbench_core without other ranks: by name, and with nothing changed."""

import pytest
import torch
from mlbench_core.aggregation.pytorch.centralized import AllReduceAggregation
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from support.cases import over
from support.eager_models import (
    Doubled,
    Mixed,
    assert_unchanged,
    by_layer_and_by_model,
    snapshot,
    with_gradients,
)
from torch import nn


def embedding():
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(5, 2, sparse=True))
    model[1](torch.tensor([1])).sum().backward()
    model[0](torch.ones(1, 3)).sum().backward()
    return model


def complex_model():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.weight.grad = torch.ones(2, dtype=torch.complex64)
    return model


def expanded_gradient():
    model = nn.Linear(2, 2)
    model.bias.grad = torch.ones(1).expand(2)
    return model


REFUSED = {
    "sparse": (embedding, "Doubled of gradients: '1.weight': it is sparse"),
    "complex": (complex_model, r"'weight': complex numbers \(torch.complex64\) are not supported"),
    "meta": (lambda: with_gradients(nn.Linear(2, 2, device="meta")), "'weight': it is on the meta"),
    "expanded": (expanded_gradient, r"'bias': elements share memory \(strides \[0\]\)"),
}


@pytest.mark.parametrize(("make", "text"), REFUSED.values(), ids=REFUSED)
def test_tensors_that_cannot_be_aggregated_are_refused_by_name(make, text):
    doubled = Doubled()
    for function in by_layer_and_by_model(doubled.agg_grad):
        with pytest.raises(ValueError, match=text):
            function(make(), "x")
    assert doubled.seen == []


BAD_CALLS = {
    "unknown": ("mean", None, NotImplementedError, "op='mean' is not known"),
    "missing": ("avg_custom", None, ValueError, "op='avg_custom' needs a denominator"),
    "zero": ("custom_avg", 0, ValueError, "the denominator is 0.0"),
    "zero-tensor": ("avg_custom", torch.zeros(1), ValueError, "the denominator is 0.0"),
    "nan": ("avg_custom", float("nan"), ValueError, "the denominator is nan"),
    "infinite": ("avg_custom", torch.tensor(float("inf")), ValueError, "the denominator is inf"),
    "several": ("avg_custom", torch.ones(2), ValueError, "the denominator has 2 elements"),
}


@over(divide_before=[False, True])
@pytest.mark.parametrize(("op", "denom", "kind", "text"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_arguments_change_nothing(op, denom, kind, text, divide_before):
    model = with_gradients(Mixed())
    before = snapshot(model)
    aggregation = AllReduceAggregation(1, divide_before)
    functions = by_layer_and_by_model(aggregation.agg_grad)
    for function in functions + by_layer_and_by_model(aggregation.agg_model):
        with pytest.raises(kind, match=text):
            function(model, op, denom)
    data = torch.ones(3)
    with pytest.raises(kind, match=text):
        aggregation._agg(data, op, denom)
    assert torch.equal(data, torch.ones(3))
    assert_unchanged(model, before)


@over(op=["sum", "min", "max", "avg_custom"])
def test_decentralized_has_the_mean_only(op):
    aggregation = DecentralizedAggregation(0, [])
    model = nn.Linear(2, 2)
    before = snapshot(model)
    with pytest.raises(NotImplementedError, match=f"no op='{op}'; 'avg_world'"):
        aggregation.agg_model()(model, op, 2)
    assert_unchanged(model, before)


def integers():
    model = nn.Module()
    model.counts = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    model.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
    return model


def test_integers_have_sums_and_no_means():
    model = integers()
    everything = AllReduceAggregation(1)
    with pytest.raises(ValueError, match=r"'counts': torch.int64 has no avg_world; use sum, min"):
        everything.agg_model()(model, "avg")
    with pytest.raises(ValueError, match=r"'counts': torch.int64 has no avg_custom"):
        everything.agg_model()(model, "avg_custom", 2)
    with pytest.raises(ValueError, match="'flags': booleans have no sum"):
        everything.agg_model()(model, "sum")
    with pytest.raises(ValueError, match=r"'counts': torch.int64 has no mean"):
        DecentralizedAggregation(0, []).agg_model()(model, "avg")
    everything.agg_model()(model, "max")
    everything.agg_grad()(model, "avg")  # there are none
    assert model.counts.tolist() == [1, 2]
    assert model.flags.tolist() == [True, False]


def test_dividing_by_a_denominator_alone():
    data = torch.tensor([2.0, 4.0])
    assert AllReduceAggregation(1)._agg(data.clone(), "avg_custom", 4).tolist() == [0.5, 1]
    before = AllReduceAggregation(1, divide_before=True)
    assert before._agg(data, "custom_avg", torch.tensor([4])).tolist() == [0.5, 1]


@over(size=[0, -1, 1.5, "2"])
def test_the_world_size_is_a_positive_integer(size):
    with pytest.raises(ValueError, match="world_size must be a positive integer"):
        AllReduceAggregation(size)


def test_neighbours_are_other_ranks():
    with pytest.raises(ValueError, match=r"rank 1 is in its own list of neighbours \[0, 1\]"):
        DecentralizedAggregation(1, [1, 0])
    with pytest.raises(ValueError, match="must not be negative"):
        DecentralizedAggregation(0, [-1])
    with pytest.raises(ValueError, match="must not be negative"):
        DecentralizedAggregation(-1, [0])
    assert DecentralizedAggregation(0, [2, 1, 2]).neighbors == [1, 2]


def test_other_ranks_need_a_group(monkeypatch):
    """Silence would be a model per rank."""
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) before the first aggregation"):
        AllReduceAggregation(2).agg_model()(nn.Linear(2, 2), "avg")
    monkeypatch.setenv("WORLD_SIZE", "2")  # a launcher's
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) before the first aggregation"):
        Doubled().agg_model()(nn.Linear(2, 2), "avg")
    AllReduceAggregation(1).agg_model()(nn.Linear(2, 2), "avg")


def test_arguments_that_do_not_fit_one_rank_are_refused_at_the_first_call():
    with pytest.raises(ValueError, match=r"rank 0: its neighbours \[3\] are not in the group of 1"):
        DecentralizedAggregation(0, [3]).agg_model()(nn.Linear(2, 2), "avg")
    with pytest.raises(ValueError, match="made with rank=1, but the process is 0"):
        DecentralizedAggregation(1, []).agg_model()(nn.Linear(2, 2), "avg")
