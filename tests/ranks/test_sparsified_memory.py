"""Residuals of SparsifiedAggregation: after bad values, frozen parameters, checkpoints."""

import copy

import pytest
import torch
import torch.distributed as dist
from mlbench_core.aggregation.pytorch.centralized import SparsifiedAggregation
from ranks.test_power_aggregation import give_gradients, gradients
from ranks.test_sparsified_aggregation import BY_LAYER, RATIO
from support import training
from support.error_feedback import all_bits, error_of, wide_network


@training.with_group
def change_what_is_trained():
    """A parameter that is frozen for a while keeps its residual."""
    model = wide_network()
    aggregation = SparsifiedAggregation(model, ratio=RATIO)
    rank = dist.get_rank()
    give_gradients(model, 0)
    aggregation.agg_grad()(model, "avg")
    before = error_of(aggregation.state_dict(), rank, "5.weight")
    model[5].weight.requires_grad_(False).grad = None
    for call in range(1, 3):
        give_gradients(model, call)
        aggregation.agg_grad()(model, "avg")
    kept = torch.equal(error_of(aggregation.state_dict(), rank, "5.weight"), before)
    model[5].weight.requires_grad_(True)
    give_gradients(model, 3, scale=0.0)
    aggregation.agg_grad()(model, "avg")
    return kept, bool(before.any()), bool(model[5].weight.grad.any())


def test_a_residual_survives_freezing(ranks):
    assert ranks(2, change_what_is_trained) == [(True, True, True)] * 2


@training.with_group
def bad_gradient(by_layer, bad):
    model = wide_network()
    aggregation = SparsifiedAggregation(model, ratio=RATIO)
    aggregate = aggregation.agg_grad(by_layer)
    for call in range(2):
        give_gradients(model, call)
        aggregate(model, "avg")
    before = aggregation.state_dict()
    give_gradients(model, 2)
    if dist.get_rank() == 1:
        model[2].weight.grad[1, 1, 1] = bad
    aggregate(model, "avg")
    after = aggregation.state_dict()
    seen = not all(g.isfinite().all() for g in gradients(model).values())
    kept = all_bits(before, but="calls") == all_bits(after, but="calls")
    give_gradients(model, 3)
    aggregate(model, "avg")
    return kept, seen, all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("by_layer", "bad"), [(False, float("nan")), (True, float("inf"))])
def test_a_bad_value_on_one_rank_leaves_all_memory(ranks, by_layer, bad):
    assert ranks(2, bad_gradient, by_layer, bad) == [(True, True, True)] * 2


@training.with_group
def save_and_go_on(by_layer):
    model = wide_network()
    first = SparsifiedAggregation(model, ratio=RATIO)
    for call in range(3):
        give_gradients(model, call)
        if call == 1 and dist.get_rank() == 0:
            model[0].weight.grad[0, 0] = torch.inf  # a call that does not count
        first.agg_grad(by_layer)(model, "avg")
    state = copy.deepcopy(first.state_dict())
    second = SparsifiedAggregation(model, ratio=RATIO)
    second.agg_grad(by_layer)(model, "avg")  # something else, to be forgotten
    second.load_state_dict(state)
    assert all_bits(second.state_dict()) == all_bits(state)
    for call in range(3, 9):
        results = []
        for aggregation in (first, second):
            give_gradients(model, call)
            aggregation.agg_grad(by_layer)(model, "avg")
            results.append((training.bits(gradients(model).values()), aggregation.state_dict()))
        assert results[0][0] == results[1][0]
        assert all_bits(results[0][1]) == all_bits(results[1][1])
    return int(first.state_dict()["communications"])


@BY_LAYER
def test_a_saved_memory_goes_on_to_the_bit(ranks, by_layer):
    assert ranks(2, save_and_go_on, by_layer) == [8] * 2
