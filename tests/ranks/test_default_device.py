"""`torch.set_default_device`: what bagua makes for itself stays where bagua needs it.

The default device is "meta", on which every value is lost: whatever is not on CPU by bagua's own
choice shows. With torch.set_default_device("cuda") the same tensors would go to gloo and the core.
"""

import pytest
import torch
import torch.distributed as dist
from mlbench_core.aggregation.pytorch import centralized, decentralized
from ranks.test_residual_aggregations import give_gradients
from support import training
from support.error_feedback import wide_network
from support.every_algorithm import ALGORITHMS, wrapped


@training.with_group
def train(name):
    model = wide_network()
    data = [training.batch(step, dist.get_rank()) for step in range(4)]
    torch.set_default_device("meta")
    try:
        model, optimizer = wrapped(name, model)
        training.train(model, optimizer, data)
        model.bagua_algorithm.load_state_dict(model.bagua_algorithm.state_dict())
        if name == "async":
            model.bagua_algorithm.abort(model)
    finally:
        torch.set_default_device(None)
    return all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains(ranks, name):
    assert ranks(2, train, name) == [True, True]


@training.with_group
def aggregate(name):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = wide_network()
    make = {
        "all_reduce": lambda: centralized.AllReduceAggregation(size),
        "power": lambda: centralized.PowerAggregation(model, rank=2, world_size=size),
        "sparsified": lambda: centralized.SparsifiedAggregation(model, ratio=0.1),
        "decentralized": lambda: decentralized.DecentralizedAggregation(rank, [1 - rank]),
    }[name]
    aggregation = make()
    for call in range(2):
        give_gradients(model, call)
        torch.set_default_device("meta")
        try:
            aggregation.agg_grad()(model, "avg_world")
            if call == 0 and name in ("power", "sparsified"):
                aggregation.load_state_dict(aggregation.state_dict())
        finally:
            torch.set_default_device(None)
    return all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["all_reduce", "power", "sparsified", "decentralized"])
def test_every_aggregation_aggregates(ranks, name):
    assert ranks(2, aggregate, name) == [True, True]
