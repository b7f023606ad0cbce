"""Scripts as users wrote them for Bagua on GPUs: only the launcher is another."""

import pytest

RANKS = 2

# What most training scripts began with: the device chosen by hand, data by rank.
HEAD = """
import torch
import torch.nn.functional as F
import bagua.torch_api as bagua

if torch.cuda.is_available():
    torch.cuda.set_device(bagua.get_local_rank())
bagua.init_process_group()
device = "cuda" if torch.cuda.is_available() else "cpu"

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(6, 11)
        self.norm = torch.nn.BatchNorm1d(11)
        self.out = torch.nn.Linear(11, 2)

    def forward(self, x):
        return self.out(F.relu(self.norm(self.hidden(x))))

torch.manual_seed(bagua.get_rank())
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""

TAIL = """
for step in range(12):
    generator = torch.Generator().manual_seed(step * 100 + bagua.get_rank())
    data = torch.randn(16, 6, generator=generator).to(device)
    target = (data.sum(1) > 0).long()
    optimizer.zero_grad()
    loss = F.nll_loss(F.log_softmax(model(data), dim=1), target)
    loss.backward()
    optimizer.step()
    if step == 0:
        first = loss.item()
total = torch.tensor([loss.item() / bagua.get_world_size()]).to(device)
bagua.allreduce_inplace(total, op=bagua.ReduceOp.SUM)
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
everyone = torch.zeros(bagua.get_world_size() * weights.numel()).to(device)
bagua.allgather(weights, everyone)
spread = (everyone.view(bagua.get_world_size(), -1) - weights).abs().max().item()
assert loss.item() < first, (first, loss.item())
print("spread", spread, "counter", model.bagua_ddp.bagua_train_step_counter)
"""

SCRIPTS = {
    "registry": """
from bagua.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry
assert "bytegrad" in GlobalAlgorithmRegistry.available_algorithms()
model = model.with_bagua([optimizer], Algorithm.init("bytegrad", hierarchical=False))
""",
    "ddp": """
from bagua.torch_api.algorithms import gradient_allreduce
model = bagua.data_parallel.DistributedDataParallel(
    model,
    optimizers=[optimizer],
    algorithm=gradient_allreduce.GradientAllReduceAlgorithm(hierarchical=True),
)
assert all(name.startswith("module.") for name in model.state_dict())
""",
    "ddp_compatible": """
from bagua.torch_api.algorithms import bytegrad
from bagua.torch_api.ddp_compatible import DistributedDataParallel as DDP
model = DDP(model, algorithm=bytegrad.ByteGradAlgorithm())
""",
    "fused_optimizer": """
from bagua.torch_api.algorithms import gradient_allreduce
optimizer = bagua.contrib.fuse_optimizer(optimizer)
model = model.with_bagua(
    [optimizer], gradient_allreduce.GradientAllReduceAlgorithm(), do_flatten=False)
F.nll_loss(F.log_softmax(model(torch.ones(4, 6)), 1), torch.ones(4).long()).backward()
optimizer.fuse_step()
model = model.with_bagua(
    [optimizer], gradient_allreduce.GradientAllReduceAlgorithm(), do_flatten=False)
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_written_for_bagua_runs(run_script, name):
    ends = run_script(RANKS, HEAD + SCRIPTS[name] + TAIL)
    for end in ends:
        assert end.returncode == 0, end.stderr
        assert "Traceback" not in end.stderr
        words = end.stdout.split()
        assert float(words[1]) == 0.0, "ranks agree to the bit"
        assert words[3] == "12"


TORCH = """
import os
import torch
import torch.distributed as dist
from bagua.torch_api.data_parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(37, 6)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DDP(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "{folder}/checkpoint.pt")
    dist.barrier()
    model.load_state_dict(torch.load("{folder}/checkpoint.pt"))
print("loss", loss.item())
dist.destroy_process_group()
"""


def test_a_script_written_for_torch_runs_after_one_import_has_changed(run_script, tmp_path):
    for end in run_script(3, TORCH.replace("{folder}", str(tmp_path))):
        assert end.returncode == 0, end.stderr
        assert end.stderr == ""
        assert float(end.stdout.split()[1]) < 0.5
