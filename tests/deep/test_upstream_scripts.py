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

EXACT = {
    "with_bagua": """
from bagua.torch_api.algorithms import gradient_allreduce
algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
model = model.with_bagua([optimizer], algorithm)
""",
    "flattening_off": """
from bagua.torch_api.algorithms import bytegrad
model = model.with_bagua([optimizer], bytegrad.ByteGradAlgorithm(), do_flatten=False)
""",
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
    "ddp_as_torchs": """
from bagua.torch_api.data_parallel import DistributedDataParallel as DDP
model = DDP(model, device_ids=[bagua.get_local_rank()] if device == "cuda" else None)
""",
    "ddp_compatible": """
from bagua.torch_api.algorithms import bytegrad
from bagua.torch_api.ddp_compatible import DistributedDataParallel as DDP
model = DDP(model, algorithm=bytegrad.ByteGradAlgorithm())
""",
    "own_algorithm": """
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry

class MyImpl(AlgorithmImpl):
    def init_operations(self, bagua_ddp, bucket):
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(hierarchical=False, average=True)

class MyAlgorithm(Algorithm):
    def reify(self, process_group):
        return MyImpl(process_group)

GlobalAlgorithmRegistry.register("mine", MyAlgorithm, description="of the script's own")
model = model.with_bagua([optimizer], Algorithm.init("mine"))
""",
    "own_group_and_ignored": """
group = bagua.communication.new_group()
model._bagua_params_and_buffers_to_ignore = ["norm.running_mean"]
from bagua.torch_api.algorithms import Algorithm
model = model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"), process_group=group)
assert model.parameters_to_ignore == {"norm.running_mean"}
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
    "switching": """
from bagua.torch_api.algorithms import Algorithm
model = model.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
F.nll_loss(F.log_softmax(model(torch.ones(4, 6)), 1), torch.ones(4).long()).backward()
model = model.with_bagua([optimizer], Algorithm.init("bytegrad"))
""",
}

LOCAL = {
    "decentralized": """
from bagua.torch_api.algorithms import decentralized
algorithm = decentralized.DecentralizedAlgorithm(
    hierarchical=False, peer_selection_mode="shift_one", communication_interval=1)
model = model.with_bagua([optimizer], algorithm)
""",
}


@pytest.mark.parametrize("name", EXACT | LOCAL)
def test_a_script_written_for_bagua_runs(run_script, name):
    ends = run_script(RANKS, HEAD + (EXACT | LOCAL)[name] + TAIL)
    for end in ends:
        assert end.returncode == 0, end.stderr
        assert "Traceback" not in end.stderr
        words = end.stdout.split()
        assert (float(words[1]) == 0.0) == (name in EXACT), "ranks agree to the bit"
        assert words[3] == "12"


# After Bagua's example communication_primitives: each of Bagua's calls beside torch's.
PRIMITIVES = """
import torch
import torch.distributed as dist
import bagua.torch_api as bagua

bagua.init_process_group()
rank, size = bagua.get_rank(), bagua.get_world_size()
comm = bagua.communication._get_default_group().get_global_communicator()
torch.manual_seed(rank)
if rank == 0:
    sent = torch.rand(4)
    dist.send(sent, 1)
    bagua.send(sent, 1, comm=comm)
elif rank == 1:
    torchs, baguas = torch.zeros(4), torch.zeros(4)
    dist.recv(torchs, 0)
    bagua.recv(baguas, 0, comm=comm)
    assert torch.equal(torchs, baguas)

torchs = torch.rand(4)
baguas = torchs.clone()
dist.broadcast(torchs, 0)
bagua.broadcast(baguas, 0, comm=comm)
assert torch.equal(torchs, baguas)

torchs = torch.rand(4)
baguas, result = torchs.clone(), torch.zeros(4)
dist.all_reduce(torchs)
bagua.allreduce(baguas, result, comm=comm)
bagua.allreduce_inplace(baguas, comm=comm)
assert torch.allclose(torchs, result) and torch.equal(baguas, result)

torchs = torch.rand(4)
baguas, result = torchs.clone(), torch.zeros(4)
dist.reduce(torchs, 1)
bagua.reduce(baguas, result, dst=1, comm=comm)
bagua.reduce_inplace(baguas, dst=1, comm=comm)
if rank == 1:
    assert torch.allclose(torchs, result) and torch.equal(baguas, result)

sent, result = torch.rand(4), torch.zeros(4 * size)
parts = [torch.zeros(4) for _ in range(size)]
dist.all_gather(parts, sent)
bagua.allgather(sent, result, comm=comm)
assert torch.equal(torch.cat(parts), result)

parts, torchs, result = torch.rand(size, 4), torch.zeros(4), torch.zeros(4)
dist.reduce_scatter_tensor(torchs, parts.view(-1))
bagua.reduce_scatter(parts, result, comm=comm)
assert torch.allclose(torchs, result)

torchs, result = torch.zeros(size, 4), torch.zeros(size, 4)
dist.all_to_all_single(torchs, parts)
bagua.alltoall(parts, result, comm=comm)
assert torch.equal(torchs, result)

counts = [rank + other for other in range(size)]  # as many from a rank as to it
starts = torch.cumsum(torch.tensor([0, *counts]), 0)  # one more than ranks, not of type int
sent = 100.0 * rank + torch.arange(sum(counts))
torchs, result = torch.zeros(sum(counts)), torch.zeros(sum(counts))
dist.all_to_all_single(torchs, sent, counts, counts)
bagua.alltoall_v(sent, counts, starts, result, counts, starts, comm=comm)
assert torch.equal(torchs, result)
print("done")
"""


@pytest.mark.parametrize("size", [2, 3, 4], ids="n{}".format)
def test_the_example_of_the_communication_primitives_runs(run_script, size):
    for end in run_script(size, PRIMITIVES):
        assert (end.returncode, end.stdout) == (0, "done\n"), end.stderr


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
