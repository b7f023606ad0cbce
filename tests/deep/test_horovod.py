"""AllReduceAggregationHVD over the real Horovod, which `make horovod` builds: its results."""

import itertools
import os

import pytest
import torch
from mlbench_core.aggregation.pytorch._horovod import _places, import_horovod
from mlbench_core.aggregation.pytorch.centralized import (
    AllReduceAggregation,
    AllReduceAggregationHVD,
)
from support.processes import pool
from support.training import bits, error_of, with_group
from torch import nn

hvd = import_horovod()  # these tests are not skipped: the error says how to get it
SIZE = 2
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EXACT = (torch.uint8, torch.int8, torch.int32, torch.int64)


@pytest.fixture(scope="module")
def horovod_ranks():
    """Two processes in which Horovod, once started, goes on from test to test."""
    with pool.Pool() as processes:
        yield lambda function, *args, **options: processes(SIZE, function, *args, **options)


class Mixed(nn.Module):
    """Parameters of several dtypes and shapes, with values of their own on every rank."""

    def __init__(self, rank, dtypes=FLOATING):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.parts = nn.ParameterList()
        for dtype in dtypes:
            for shape in ((3, 5), (7,), (), (0, 4)):
                value = torch.randn(shape, generator=generator) * 50
                value = value > 0 if dtype == torch.bool else value.to(dtype)
                self.parts.append(nn.Parameter(value, requires_grad=dtype in FLOATING))
                if dtype in FLOATING:
                    gradient = torch.randn(shape, generator=generator)
                    self.parts[-1].grad = gradient.to(dtype)


def values(model, gradients=False):
    return [p.grad if gradients else p.detach() for p in model.parameters()]


def both(divide_before):
    return [kind(SIZE, divide_before) for kind in (AllReduceAggregation, AllReduceAggregationHVD)]


def both_ways(aggregations, op, by_layer, gradients, dtypes=FLOATING, denom=None):
    """Bits after AllReduceAggregation, and after AllReduceAggregationHVD, of the same values."""
    found = []
    for aggregation in aggregations:
        model = Mixed(int(os.environ["RANK"]), dtypes)
        pointers = [tensor.data_ptr() for tensor in values(model, gradients)]
        aggregate = aggregation.agg_grad if gradients else aggregation.agg_model
        aggregate(by_layer)(model, op, denom)
        assert pointers == [tensor.data_ptr() for tensor in values(model, gradients)]
        found.append(bits(values(model, gradients)))
    return found


@with_group
def all_ways():
    untouched = bits(values(Mixed(int(os.environ["RANK"]))))
    operations = {
        "avg_world": None,
        "custom_avg": torch.tensor(3.0),
        "sum": None,
        "min": None,
        "max": None,
    }
    found = {}
    for divide_before in (False, True):
        aggregations = both(divide_before)
        for op, by_layer, gradients in itertools.product(operations, (False, True), (False, True)):
            way = (op, by_layer, gradients)
            bits_of_both = both_ways(aggregations, *way, FLOATING, operations[op])
            found[(divide_before, *way)] = bits_of_both
            assert bits_of_both[1] != untouched
    return found


def test_results_are_those_of_all_reduce_aggregation_to_the_bit(horovod_ranks):
    first, second = horovod_ranks(all_ways)
    assert first == second
    assert len(first) == 40
    for way, (expected, through_horovod) in first.items():
        assert through_horovod == expected, way


@with_group
def integers():
    found = {}
    for op, dtypes in (("sum", EXACT), ("min", (*EXACT, torch.bool)), ("max", EXACT)):
        found[op] = both_ways(both(False), op, False, False, dtypes)
    return found


def test_integers_and_booleans_travel_in_dtypes_that_horovod_reduces(horovod_ranks):
    first, second = horovod_ranks(integers)
    assert first == second
    for op, (expected, through_horovod) in first.items():
        assert through_horovod == expected, op


def overflow(divide_before):
    model = nn.Linear(3, 1, bias=False).half()
    model.weight.grad = torch.full((1, 3), 40000.0, dtype=torch.float16)
    AllReduceAggregationHVD(SIZE, divide_before).agg_grad()(model, "avg_world")
    return model.weight.grad.tolist()


def test_dividing_before_avoids_overflow_in_half_precision(horovod_ranks):
    assert horovod_ranks(overflow, False) == [[[float("inf")] * 3]] * SIZE
    assert horovod_ranks(overflow, True, init=False) == [[[40000.0] * 3]] * SIZE


def gradients_of_some():
    model = nn.ParameterList(torch.zeros(2) for _ in range(3))
    if hvd.rank() == 0:
        model[0].grad = torch.tensor([2.0, 4.0])
    model[2].grad = torch.full((2,), 1.0 + hvd.rank())
    AllReduceAggregationHVD(SIZE).agg_grad()(model, "avg_world")
    return [None if p.grad is None else p.grad.tolist() for p in model]


def test_a_rank_without_a_gradient_gets_the_others(horovod_ranks):
    found = horovod_ranks(gradients_of_some, init=False)
    assert found == [[[1.0, 2.0], None, [1.5, 1.5]]] * SIZE


def different_calls():
    model = Mixed(hvd.rank())
    before = bits(values(model))
    aggregate = AllReduceAggregationHVD(SIZE).agg_model()
    message = error_of(lambda: aggregate(model, ("sum", "min")[hvd.rank()]))
    assert bits(values(model)) == before
    return message


def test_ranks_that_differ_all_say_in_what(horovod_ranks):
    for message in horovod_ranks(different_calls, init=False):
        assert "BaguaMismatchError" in message
        assert "rank 0 has [op sum], rank 1 has [op min]" in message


def wrong_size():
    return error_of(lambda: AllReduceAggregationHVD(3))


def test_another_world_size_than_horovods_is_refused_at_construction(horovod_ranks):
    for message in horovod_ranks(wrong_size):
        assert message.startswith("ValueError: AllReduceAggregationHVD was made with world_size=3")
        assert "Horovod has 2 process(es)" in message
        assert "leave hvd.init() to this class" in message


def start_again():
    AllReduceAggregationHVD(SIZE)
    hvd.shutdown()
    assert not hvd.is_initialized()
    return overflow(True)


def test_it_starts_again_after_a_shutdown(horovod_ranks):
    assert horovod_ranks(start_again, init=False) == [[[40000.0] * 3]] * SIZE


def whereabouts():
    found = overflow(True)
    places = [f() for f in (hvd.rank, hvd.local_rank, hvd.local_size, hvd.cross_rank)]
    return found, [*places, hvd.cross_size()]


def test_it_starts_over_two_nodes(ranks):
    nodes = [{"GROUP_RANK": "0"}, {"GROUP_RANK": "1"}]
    alone_on_node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env = [node | alone_on_node for node in nodes]
    found = ranks(SIZE, whereabouts, env=env, fresh=True)
    assert found == [([[40000.0] * 3], [rank, 0, 1, rank, 2]) for rank in range(SIZE)]


def test_places_on_uneven_nodes():
    places = [vars(place) for place in _places([0, 1, 0, 1, 1])]
    assert [place["local_rank"] for place in places] == [0, 0, 1, 1, 2]
    assert [place["local_size"] for place in places] == [2, 3, 2, 3, 3]
    assert [place["cross_rank"] for place in places] == [0, 1, 0, 1, 0]
    assert [place["cross_size"] for place in places] == [2, 2, 2, 2, 1]
    assert [place["hostname"] for place in places] == ["node0", "node1", "node0", "node1", "node1"]
