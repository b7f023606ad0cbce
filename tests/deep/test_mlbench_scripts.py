"""A script written for mlbench-core's documented classes runs under torchrun as it is."""

SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mlbench_core.aggregation.pytorch.centralized import AVG_WORLD, AllReduceAggregation

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 4 * 4, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
AllReduceAggregation(world_size).agg_model()(model, AVG_WORLD)
aggregation = AllReduceAggregation(world_size=world_size, divide_before=True, use_cuda=False)
agg_grad = aggregation.agg_grad(by_layer=False)

losses = []
for step in range(20):
    generator = torch.Generator().manual_seed(100 * (step % 3) + rank)
    data = torch.randn(16, 1, 6, 6, generator=generator)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), (data.mean((1, 2, 3)) > 0).long())
    loss.backward()
    agg_grad(model, op="avg_world")
    optimizer.step()
    losses.append(loss.item())
assert sum(losses[-3:]) < sum(losses[:3]), losses
mine = torch.cat([p.detach().flatten() for p in model.parameters()])
everyone = [torch.zeros_like(mine) for _ in range(world_size)]
dist.all_gather(everyone, mine)
assert all(torch.equal(other, mine) for other in everyone)
dist.destroy_process_group()
"""


def test_a_script_written_for_mlbench_core_runs(run_script):
    for end in run_script(2, SCRIPT):
        assert (end.returncode, end.stdout, end.stderr) == (0, "", "")
