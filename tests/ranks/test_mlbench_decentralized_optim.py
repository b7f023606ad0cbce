"""DecentralizedSGD on several ranks, rank 0 among them."""

import pytest
import torch
import torch.distributed as dist
from mlbench_core.optim.pytorch import DecentralizedSGD
from support.training import (
    assert_ranks_agree,
    batch,
    bits,
    local_gradients,
    mean_over_ranks,
    network,
    squared_error,
    train,
    with_group,
)
from torch import nn

STEPS = 4


def neighbors(graph):
    rank, size = dist.get_rank(), dist.get_world_size()
    if graph == "path":  # irregular
        return [other for other in (rank - 1, rank + 1) if 0 <= other < size]
    return [(rank - 1) % size, (rank + 1) % size]  # with 2 ranks one neighbour twice


@with_group
def train_decentralized(graph, by_layer):
    rank = dist.get_rank()
    model = network(seed=rank)
    optimizer = DecentralizedSGD(rank, neighbors(graph), model, lr=0.2, by_layer=by_layer)
    assert_ranks_agree(model)
    for step in range(STEPS):
        data = batch(step, rank)
        mean = {name: mean_over_ranks(p) for name, p in model.named_parameters()}
        own = local_gradients(model, squared_error, data)
        gradient = {name: mean_over_ranks(value) for name, value in own.items()}
        train(model, optimizer, [data])
        for name, p in model.named_parameters():
            expected = mean[name] - 0.2 * gradient[name]
            torch.testing.assert_close(mean_over_ranks(p), expected, rtol=1e-5, atol=1e-6)
    return bits(model.parameters())


@pytest.mark.parametrize("by_layer", [False, True], ids=["by_model", "by_layer"])
@pytest.mark.parametrize(("n", "graph"), [(2, "ring"), (3, "path"), (4, "ring")])
def test_the_mean_of_decentralized_ranks_moves_as_by_sgd(ranks, n, graph, by_layer):
    digests = ranks(n, train_decentralized, graph, by_layer)
    assert len(set(digests)) == (1 if n == 2 else n)  # not an all_reduce


@with_group
def agree_by_mixing():
    rank = dist.get_rank()
    model = nn.Linear(3, 2)
    optimizer = DecentralizedSGD(rank, neighbors("path"), model, lr=0.1)
    for p in model.parameters():
        p.data.fill_(float(rank))
        p.grad = torch.zeros_like(p)
    for _ in range(40):
        optimizer.step()
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


def test_without_gradients_decentralized_ranks_agree_on_their_mean(ranks):
    for values in ranks(3, agree_by_mixing):
        assert values == pytest.approx([1.0] * 8, abs=1e-5)
