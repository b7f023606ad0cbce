"""DecentralizedAggregation on ranks: W x on several graphs, and lists that cannot be."""

import torch
import torch.distributed as dist
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from oracle import neighbor_average as oracle
from support import graphs, training
from support.cases import over
from support.eager_models import assert_aggregates, assert_unchanged, snapshot
from torch import nn

GRAPHS = {
    "pair": graphs.ring(2),
    "ring-of-4": graphs.ring(4),
    "complete-of-4": graphs.complete(4),
    "star-of-4": graphs.star(4, hub=3),
    "path-of-4": [[1], [0, 2], [1, 3], [2]],
    "pair-and-one-alone": [[2], [], [0]],
    "nobody-talks": [[], []],
}
TOLERANCE = {torch.float16: 2e-3, torch.float32: 5e-7, torch.float64: 1e-14}


def aggregation_for(graph):
    """Neighbours as a user might list them: in any order, some twice."""
    neighbors = graph[dist.get_rank()]
    return DecentralizedAggregation(dist.get_rank(), neighbors[::-1] + neighbors)


@training.with_group
def average_mixed(graph, by_layer):
    def expected(values):
        return oracle.average(oracle.metropolis(graph), values)[dist.get_rank()]

    aggregation = aggregation_for(graph)
    return assert_aggregates(aggregation, by_layer, "avg_world", None, expected, TOLERANCE)


@over(name=GRAPHS, by_layer=[False, True])
def test_weights_and_gradients_become_those_of_the_oracle(ranks, name, by_layer):
    graph = GRAPHS[name]
    digests = ranks(len(graph), average_mixed, graph, by_layer)
    sums = {tuple(sorted({rank, *graph[rank]})) for rank in range(len(graph))}
    assert len(set(digests)) == len(sums), "ranks with the same sum hold the same bits"


# A rank and its list, for each process; what every rank reads.
WRONG = {
    "one-sided": (
        [(0, [1]), (1, []), (2, [0])],
        "rank 0 lists 1, but 1 does not list 0",
    ),
    "one-sided-later": (
        [(0, [2]), (1, [2]), (2, [0])],
        "rank 1 lists 2, but 2 does not list 1",
    ),
    "outside": (
        [(0, [1]), (1, [0, 3]), (2, [])],
        "on rank 1: its neighbours [3] are not in the group of 3 rank(s)",
    ),
    "another-rank": (
        [(0, [1]), (1, [0]), (1, [0])],
        "on rank 2: it was made with rank=1, but the process is 2",
    ),
}


@training.with_group
def average_with_wrong_lists(lists):
    model = nn.Linear(3, 2)
    before = snapshot(model)
    aggregation = DecentralizedAggregation(*lists[dist.get_rank()])
    weights, gradients = aggregation.agg_model(), aggregation.agg_grad()
    texts = [
        training.error_of(lambda: weights(model, "avg_world"), ValueError),
        training.error_of(lambda: gradients(model, "avg_world"), ValueError),
    ]
    assert_unchanged(model, before)
    return texts


@over(wrong=WRONG)
def test_lists_that_cannot_be_are_refused_on_every_rank(ranks, wrong):
    lists, text = WRONG[wrong]
    for first, second in ranks(3, average_with_wrong_lists, lists):
        assert text in first
        assert text in second, "the second call, too"
