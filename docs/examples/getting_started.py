"""Two ranks learn a function together: torchrun --nproc_per_node=2 getting_started.py"""

import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import ByteGradAlgorithm

bagua.init_process_group()  # gloo on CPU, NCCL on CUDA
rank = bagua.get_rank()
device = torch.device("cuda", bagua.get_local_rank()) if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model = bagua.wrap(model, [optimizer], ByteGradAlgorithm())

data = torch.Generator().manual_seed(rank)  # each rank has other data
for step in range(200):
    inputs = torch.rand(256, 2, generator=data).to(device)
    targets = inputs.prod(1, keepdim=True)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 50 == 49:
        sent = model.bagua_stats()["total"]["bytes_sent"]
        print(f"step {step + 1}: loss {loss.item():.5f}, {sent} bytes sent")

bagua.destroy_process_group()
