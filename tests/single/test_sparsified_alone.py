"""SparsifiedAggregation in a process without a group: no messages, no residual."""

import torch
from mlbench_core.aggregation.pytorch.centralized import SparsifiedAggregation
from torch import nn


def test_alone_gradients_are_unchanged():
    model = nn.Linear(30, 20)
    aggregation = SparsifiedAggregation(model, ratio=0.01)
    for call in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        before = [parameter.grad.clone() for parameter in model.parameters()]
        aggregation.agg_grad(by_layer=call == 2)(model, "avg_world")
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.grad, gradient)
    state = aggregation.state_dict()
    assert (state["ranks"], state["calls"], int(state["communications"])) == ("0", 3, 3)
    assert not state["rank0/error/weight"].any()


def test_alone_the_mean_residual_is_added_once():
    """Two ranks had residuals 1 and 3 when a single process continues: it adds their mean."""
    model = nn.Linear(3, 2, bias=False)
    aggregation = SparsifiedAggregation(model)
    owed = {f"rank{r}/error/weight": torch.full((2, 3), 1.0 + 2 * r) for r in range(2)}
    counted = {"calls": 5, "communications": torch.tensor([5])}
    aggregation.load_state_dict({"ranks": "0 1", **counted, **owed})
    for paid in (2.0, 0.0):
        model.weight.grad = torch.ones(2, 3)
        aggregation.agg_grad()(model, "avg")
        assert torch.equal(model.weight.grad, torch.full((2, 3), 1 + paid))
