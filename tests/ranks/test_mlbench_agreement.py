"""Calls that differ between ranks end in an error on all of them; gradients may differ."""

import functools

import pytest
import torch
import torch.distributed as dist
from mlbench_core.aggregation.pytorch.centralized import AllReduceAggregation
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from support import faults, graphs, training
from support.cases import over
from support.eager_models import assert_unchanged, snapshot
from torch import nn

KINDS = {
    "all_reduce": lambda: AllReduceAggregation(dist.get_world_size()),
    "decentralized": lambda: DecentralizedAggregation(
        dist.get_rank(), graphs.ring(dist.get_world_size())[dist.get_rank()]
    ),
}
per_class = pytest.mark.parametrize("name", KINDS)


def with_gradients(model):
    for p in model.parameters():
        p.grad = torch.full_like(p, dist.get_rank() + 1)
    return model


def call(aggregation, model, op="avg_world", denom=None, by_layer=False, weights=True):
    get = aggregation.agg_model if weights else aggregation.agg_grad
    get(by_layer)(model, op, denom)


# What the last rank does otherwise, and what the others read.
DIFFERENCES = {
    "more-parameters": (
        lambda a: call(a, nn.Sequential(training.network(), nn.Linear(2, 2))),
        "[0.0.",
    ),
    "shape": (lambda a: call(a, training.network(outputs=4)), "has [2.weight [4, 7]"),
    "transposed": (lambda a: call(a, transposed()), "has [0.weight [5, 7]"),
    "dtype": (lambda a: call(a, training.network().double()), "[0.weight [7, 5] torch.float64]"),
    "gradients": (
        lambda a: call(a, with_gradients(training.network()), weights=False),
        "of gradients]",
    ),
    "by-layer": (lambda a: call(a, training.network(), by_layer=True), "has [by layer]"),
}
OPERATIONS = {  # of all_reduce only
    "operation": (lambda a: call(a, training.network(), "sum"), "has [op sum]"),
    "denominator": (lambda a: call(a, training.network(), "avg_custom", 3), "has [denom 3.0]"),
}


def transposed():
    model = training.network()
    model[0].weight = nn.Parameter(model[0].weight.detach().T)
    return model


@training.with_group
def call_otherwise(name, differences):
    texts = {}
    for difference in differences:
        model = with_gradients(training.network())
        before, aggregation = snapshot(model), KINDS[name]()
        others = "avg_custom" if difference == "denominator" else "avg_world"
        differing = (DIFFERENCES | OPERATIONS)[difference][0]
        run = functools.partial(call, aggregation, model, others, 2)
        if faults.is_last():
            run = functools.partial(differing, aggregation)
        texts[difference] = [training.error_of(run), training.error_of(run)]
        assert_unchanged(model, before)
    return texts


@per_class
def test_another_call_on_one_rank_is_found_on_all_of_them(ranks, name):
    differences = DIFFERENCES | OPERATIONS if name == "all_reduce" else DIFFERENCES
    for texts in ranks(3, call_otherwise, name, list(differences)):
        for difference, (_, said) in differences.items():
            for text in texts[difference]:
                assert text.startswith("BaguaMismatchError: ranks differ in "), difference
                assert said in text, difference


@training.with_group
def disagree_once_and_go_on():
    aggregation = AllReduceAggregation(dist.get_world_size())
    outputs = 4 if faults.is_last() else 3
    training.error_of(lambda: call(aggregation, training.network(outputs=outputs)))
    model = training.network(seed=dist.get_rank())
    call(aggregation, model)
    training.assert_ranks_agree(model)
    return aggregation.traffic()["messages_sent"]


def test_a_disagreement_does_not_end_the_aggregation(ranks):
    assert ranks(2, disagree_once_and_go_on) == [2 + 2 + 2] * 2


@training.with_group
def unequal_gradients(name, by_layer):
    """Parameter i has a gradient on the ranks whose bit i is set; returns (gradient or None)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.ParameterList([torch.zeros(3) for _ in range(2**size)])
    for i, p in enumerate(model):
        p.requires_grad_(i % 3 != 0)
        if i >> rank & 1:
            p.grad = torch.full((3,), float(2**rank))
    aggregation = KINDS[name]()
    seen = []
    for _ in range(2):
        call(aggregation, model, "avg", by_layer=by_layer, weights=False)
        seen.append([None if p.grad is None else p.grad.tolist() for p in model])
    return seen


@over(name=KINDS, by_layer=[False, True], n=[2, 3])
def test_a_rank_without_a_gradient_brings_zeros_and_keeps_the_mean(ranks, name, by_layer, n):
    """On up to three ranks a ring is complete: both classes give the mean of all."""
    means = [sum(2**r for r in range(n) if i >> r & 1) / n for i in range(1, 2**n)]
    expected = torch.tensor([[mean] * 3 for mean in means])
    for first, second in ranks(n, unequal_gradients, name, by_layer):
        assert first[0] is second[0] is None, "no rank had it"
        torch.testing.assert_close(torch.tensor(first[1:]), expected)
        torch.testing.assert_close(torch.tensor(second[1:]), expected)


@training.with_group
def many_gradients(count):
    """More parameters than the first message of the agreement has room for."""
    rank = dist.get_rank()
    model = nn.ParameterList([torch.zeros(()) for _ in range(count)])
    model[(count - 1) * rank].grad = torch.tensor(4.0)
    call(AllReduceAggregation(dist.get_world_size()), model, "avg", weights=False)
    return [i for i, p in enumerate(model) if p.grad is not None and p.grad == 2]


@over(count=[1007, 1008, 1009, 3000])
def test_any_number_of_parameters_is_agreed_on(ranks, count):
    assert ranks(2, many_gradients, count) == [[0, count - 1]] * 2


@training.with_group
def one_sparse_gradient(name):
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 2, sparse=faults.is_last()))
    model[0](model[1](torch.tensor([1]))).sum().backward()
    aggregation, before = KINDS[name](), model[0].weight.grad.clone()
    text = training.error_of(lambda: call(aggregation, model, weights=False), ValueError)
    assert torch.equal(model[0].weight.grad, before)
    assert aggregation.traffic()["bytes_sent"] <= 2 * 1024, "the agreement and no data"
    return text


@per_class
def test_a_sparse_gradient_on_one_rank_is_refused_on_all_by_name(ranks, name):
    first, second, last = ranks(3, one_sparse_gradient, name)
    for text in (first, second):
        assert "'1.weight': another rank cannot aggregate it, and says why" in text
    assert "of gradients: '1.weight': it is sparse (torch.sparse_coo)" in last
