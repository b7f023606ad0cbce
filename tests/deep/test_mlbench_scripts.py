"""Scripts written for mlbench-core's documented classes run under torchrun as they are."""

import pytest

HEAD = """
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 4 * 4, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def batch(step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    data = torch.randn(16, 1, 6, 6, generator=generator)
    return data, (data.mean((1, 2, 3)) > 0).long()
"""

TAIL = """
losses = []
for step in range(20):
    data, target = batch(step % 3)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    step_with_aggregation()
    losses.append(loss.item())
assert sum(losses[-3:]) < sum(losses[:3]), losses
mine = torch.cat([p.detach().flatten() for p in model.parameters()])
everyone = [torch.zeros_like(mine) for _ in range(world_size)]
dist.all_gather(everyone, mine)
print("spread", max((other - mine).abs().max().item() for other in everyone))
dist.destroy_process_group()
"""

SCRIPTS = {
    "all_reduce_of_gradients": """
from mlbench_core.aggregation.pytorch.centralized import AllReduceAggregation

aggregation = AllReduceAggregation(world_size=world_size, divide_before=True, use_cuda=False)
aggregation.agg_model(by_layer=False)(model, op="avg_world")
agg_grad = aggregation.agg_grad(by_layer=False)

def step_with_aggregation():
    agg_grad(model, op="avg_world")
    optimizer.step()
""",
    "all_reduce_by_layer_with_a_denominator": """
from mlbench_core.aggregation.pytorch.centralized import (
    ALLREDUCE_AGGREGATION_OPS,
    AVG_CUSTOM,
    AVG_WORLD,
    AllReduceAggregation,
)

assert AVG_CUSTOM in ALLREDUCE_AGGREGATION_OPS
AllReduceAggregation(world_size).agg_model()(model, AVG_WORLD)
agg_grad = AllReduceAggregation(world_size).agg_grad(by_layer=True)

def step_with_aggregation():
    full_batch = torch.tensor([float(world_size)])
    agg_grad(model, AVG_CUSTOM, denom=full_batch)
    optimizer.step()
""",
    "own_aggregation": """
from mlbench_core.aggregation.pytorch.aggregation import Aggregation

class Mine(Aggregation):
    def _agg(self, data, op, denom=None):
        assert op == "mean"
        dist.all_reduce(data)
        return data / world_size

Mine(use_cuda=False)._agg_weights_by_model(model, "mean")

def step_with_aggregation():
    Mine()._agg_gradients_by_layer(model, "mean")
    optimizer.step()
""",
}

LOCAL = {
    "decentralized": """
from mlbench_core.aggregation.pytorch.decentralized import DecentralizedAggregation

neighbors = [(rank + 1) % world_size, (rank - 1) % world_size]
agg_model = DecentralizedAggregation(rank, neighbors).agg_model()

def step_with_aggregation():
    optimizer.step()
    agg_model(model, op="avg_world")
""",
}


@pytest.mark.parametrize(("name", "n"), [*((name, 2) for name in SCRIPTS), ("decentralized", 4)])
def test_a_script_written_for_mlbench_core_runs(run_script, name, n):
    for end in run_script(n, HEAD + (SCRIPTS | LOCAL)[name] + TAIL):
        assert end.returncode == 0, end.stderr
        assert "Traceback" not in end.stderr
        spread = float(end.stdout.split()[1])
        assert (spread == 0.0) == (name in SCRIPTS), "ranks agree to the bit, or are on their own"
