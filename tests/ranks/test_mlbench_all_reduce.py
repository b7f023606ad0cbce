"""AllReduceAggregation on ranks: against torch's own sums, and what a call leaves as it was."""

import copy
import functools

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua import _C
from mlbench_core.aggregation.pytorch.centralized import AllReduceAggregation
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from support import faults, training
from support.cases import over
from support.eager_models import (
    assert_aggregates,
    assert_unchanged,
    of_rank,
    snapshot,
    tensors_of,
)
from torch import nn

DENOMINATOR = 6.0
REDUCE = {
    "avg_world": lambda all_values: all_values.sum(0) / len(all_values),
    "avg_custom": lambda all_values: all_values.sum(0) / DENOMINATOR,
    "sum": lambda all_values: all_values.sum(0),
    "min": lambda all_values: all_values.amin(0),
    "max": lambda all_values: all_values.amax(0),
}
TOLERANCE = {torch.float16: 4e-3, torch.float32: 1e-6, torch.float64: 1e-14}


@training.with_group
def reduce_mixed(op, by_layer, divide_before):
    def expected(values):
        return REDUCE[op](torch.stack([value.double() for value in values]))

    aggregation = AllReduceAggregation(dist.get_world_size(), divide_before)
    denom = DENOMINATOR if op == "avg_custom" else None
    return assert_aggregates(aggregation, by_layer, op, denom, expected, TOLERANCE)


@over(op=REDUCE, by_layer=[False, True], divide_before=[False, True])
def test_every_operation_is_torchs_on_all_dtypes_and_layouts(ranks, op, by_layer, divide_before):
    assert len(set(ranks(3, reduce_mixed, op, by_layer, divide_before))) == 1, "equal bits"


ROWS = (1, 2, 5)


@training.with_group
def sums_over_all_samples(by_layer, divide_before):
    """Bits and bytes after steps of ranks with unlike batches; one process has all of them."""
    rank, total = dist.get_rank(), sum(ROWS)
    model = training.network()
    alone = copy.deepcopy(model)
    aggregation = AllReduceAggregation(dist.get_world_size(), divide_before)
    plain = AllReduceAggregation(dist.get_world_size(), divide_before)
    optimizer, other = training.sgd(model), training.sgd(alone)
    for step in range(3):
        parts = [training.batch(step, r, rows=n) for r, n in enumerate(ROWS)]
        optimizer.zero_grad()
        (training.squared_error(model, parts[rank]) * ROWS[rank]).backward()
        denom = torch.tensor(float(total)) if step else total
        aggregation.agg_grad(by_layer)(model, op="avg_custom", denom=denom)
        optimizer.step()
        other.zero_grad()
        data = tuple(torch.cat(side) for side in zip(*parts, strict=True))
        training.squared_error(alone, data).backward()
        other.step()
        plain.agg_grad(by_layer)(model, op="avg_world")  # which gradients are equal now
    training.assert_close(model, alone, rtol=1e-6, atol=1e-6)
    return training.bits(model.parameters()), aggregation.traffic() == plain.traffic()


@over(by_layer=[False, True], divide_before=[False, True])
def test_a_denominator_of_all_samples_trains_ranks_with_1_2_and_5_as_one_process(
    ranks, by_layer, divide_before
):
    results = ranks(3, sums_over_all_samples, by_layer, divide_before)
    assert len({bits for bits, _ in results}) == 1
    assert all(same_traffic for _, same_traffic in results)


@training.with_group
def average_f16(divide_before, value):
    aggregation = AllReduceAggregation(dist.get_world_size(), divide_before)
    model = nn.Linear(3, 2).half()
    for p in model.parameters():
        p.data.fill_(value)
        p.grad = p.detach().clone()
    aggregation.agg_model()(model, "avg_world")
    aggregation.agg_grad(by_layer=True)(model, "avg_custom", torch.tensor(dist.get_world_size()))
    tensors = tensors_of(model, "weight") + tensors_of(model, "gradient")
    return [tensor.flatten()[0].item() for tensor in tensors]


def test_dividing_before_the_sum_keeps_f16_from_overflow(ranks):
    """The published values: two ranks that hold 40000."""
    assert ranks(2, average_f16, True, 40000.0) == [[40000.0] * 4] * 2
    assert ranks(2, average_f16, False, 40000.0) == [[float("inf")] * 4] * 2


@training.with_group
def reduce_integers(op):
    model = nn.Module()
    rank = dist.get_rank()
    model.long = nn.Parameter(torch.tensor([rank, 2**40 + rank]), requires_grad=False)
    model.int = nn.Parameter(torch.tensor([-rank], dtype=torch.int32), requires_grad=False)
    AllReduceAggregation(dist.get_world_size()).agg_model()(model, op)
    return [p.tolist() for p in model.parameters()]


def test_integers_are_reduced_exactly(ranks):
    assert ranks(3, reduce_integers, "sum") == [[[3, 3 * 2**40 + 3], [-3]]] * 3
    assert ranks(3, reduce_integers, "min") == [[[0, 2**40], [-2]]] * 3
    assert ranks(3, reduce_integers, "max") == [[[2, 2**40 + 2], [0]]] * 3


@training.with_group
def count_bytes(by_layer):
    model = training.network()
    aggregation = AllReduceAggregation(dist.get_world_size())
    aggregation.agg_model(by_layer)(model, "avg")
    group = bagua.communication.get_default_group()
    assert group.connections.main_traffic() == {}, "lines are compared only where they differ"
    return aggregation.traffic(), sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_are_those_of_the_data_and_a_kibibyte_of_agreement(ranks, n):
    for traffic, size in ranks(n, count_bytes, False):
        share = 2 * (n - 1) / n
        assert abs(traffic["bytes_sent"] - share * (size + 1024)) <= 8
        assert traffic["messages_sent"] == 2 * 2 * (n - 1)
    for traffic, size in ranks(n, count_bytes, True):
        assert abs(traffic["bytes_sent"] - share * (size + 1024)) <= 32
        assert traffic["messages_sent"] == 5 * 2 * (n - 1), "four parameters and the agreement"


@training.with_group
def aggregate_with_a_wrong_size():
    model = training.network()
    before = snapshot(model)
    text = training.error_of(lambda: AllReduceAggregation(5).agg_model()(model, "avg"), ValueError)
    assert_unchanged(model, before)
    return text


def test_a_world_size_that_is_not_the_groups_is_refused_with_both(ranks):
    for text in ranks(2, aggregate_with_a_wrong_size):
        assert "world_size=5, but its group has 2 rank(s)" in text


@functools.partial(faults.with_bagua_group, timeout=2.0)
def wait_for_a_rank_that_does_not_come():
    model = of_rank(dist.get_rank())
    aggregation = AllReduceAggregation(dist.get_world_size())
    aggregation.agg_model()(model, "avg")
    before, text = snapshot(model), ""
    if dist.get_rank() == 0:
        function = aggregation.agg_model()
        text = training.error_of(lambda: function(model, "avg"), _C.BaguaTimeoutError)
        assert_unchanged(model, before)
    dist.barrier()
    return text


def test_a_rank_that_does_not_come_is_a_timeout_and_nothing_has_changed(ranks):
    first, _ = ranks(2, wait_for_a_rank_that_does_not_come)
    assert "all_reduce of 1024 bytes" in first


@training.with_group
def average_in_a_group():
    """What an aggregation of each class makes of the rank's number."""
    group = bagua.communication.new_group([1, 2])
    everyone = AllReduceAggregation(2, process_group=group)
    if dist.get_rank() == 0:
        return training.error_of(lambda: everyone.agg_model()(nn.Linear(2, 2), "avg"), RuntimeError)
    neighbours = DecentralizedAggregation(group.rank, [1 - group.rank], process_group=group)
    found = []
    for aggregation in (everyone, neighbours):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, float(dist.get_rank()))
        aggregation.agg_model()(model, "avg_world")
        found.append(model.weight.unique().tolist())
    return found


def test_a_group_of_some_ranks_averages_among_them_by_their_places_in_it(ranks):
    text, *members = ranks(3, average_in_a_group)
    assert members == [[[1.5], [1.5]]] * 2
    assert "not a member of the group with ranks [1, 2]" in text
