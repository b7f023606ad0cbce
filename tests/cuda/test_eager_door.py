"""mlbench's aggregations on tensors of a GPU, as they are and through CPU memory: as on CPU."""

import pytest
import torch
import torch.distributed as dist
from mlbench_core.aggregation.pytorch.centralized import (
    AllReduceAggregation,
    PowerAggregation,
    SparsifiedAggregation,
)
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation
from ranks.test_residual_aggregations import give_gradients, gradients, save_and_go_on
from support import graphs, training
from support.devices import cases_on_each, each_device
from support.error_feedback import wide_network

STEPS = 20
# Sums in another order; with low ranks products of up to 24 terms, too, which 20 rounds of error
# feedback carry on; of gradients about 1.
TOLERANCE = {"power": 1e-3}
EXACT = 1e-5


def aggregation_of(name, model, use_cuda):
    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        "all_reduce": lambda: AllReduceAggregation(size, use_cuda=use_cuda),
        "decentralized": lambda: DecentralizedAggregation(
            rank, graphs.ring(size)[rank], use_cuda=use_cuda
        ),
        "power": lambda: PowerAggregation(
            model, use_cuda, reuse_query=True, world_size=size, rank=2
        ),
        "sparsified": lambda: SparsifiedAggregation(model, use_cuda, ratio=0.1),
    }[name]()


@training.with_group
def aggregate(name, by_layer, use_cuda):
    """Gradients after each call, on CPU, and whether all ranks have them."""
    model = wide_network()
    aggregate = aggregation_of(name, model, use_cuda).agg_grad(by_layer=by_layer)
    results, equal = [], []
    for step in range(STEPS):
        give_gradients(model, step)
        places = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        aggregate(model, "avg_world")
        assert places == {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        equal.append(len(set(training.gather(training.bits(gradients(model).values())))) == 1)
        results.append(torch.cat([p.grad.cpu().flatten() for p in model.parameters()]))
    return results, equal


@cases_on_each(
    "device",
    name=["all_reduce", "decentralized", "power", "sparsified"],
    by_layer=[False, True],
    use_cuda=[True, False],
)
def test_aggregations_give_the_results_of_the_cpu(ranks, name, by_layer, use_cuda, device):
    env = training.on_device(device)
    results = ranks(3, aggregate, name, by_layer, use_cuda, env=env)
    expected = ranks(3, aggregate, name, by_layer, False)
    for (ours, equal), (theirs, _) in zip(results, expected, strict=True):
        # A ring of three is everybody, but each adds its own first.
        assert all(equal) or name == "decentralized"
        for mine, on_cpu in zip(ours, theirs, strict=True):
            assert (mine - on_cpu).abs().max() <= TOLERANCE.get(name, EXACT)


@each_device
@pytest.mark.parametrize("name", ["power", "sparsified"])
def test_memory_is_saved_and_loaded(ranks, name, device):
    env = training.on_device(device)
    assert ranks(2, save_and_go_on, name, False, env=env) == [(True, True)] * 2
