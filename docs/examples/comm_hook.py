"""torch's own DistributedDataParallel with compressed gradients: two lines more than without.

    torchrun --nproc_per_node=2 docs/examples/comm_hook.py --algorithm bytegrad

The training loop, the optimizer and checkpoints of the model stay unchanged.
"""

import argparse

import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
    PowerSGDAlgorithm,
    SparseAlgorithm,
)
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

ALGORITHMS = {
    "exact": GradientAllReduceAlgorithm(),
    "bytegrad": ByteGradAlgorithm(),
    "power_sgd": PowerSGDAlgorithm(warmup_steps=0),
    "sparse": SparseAlgorithm(ratio=0.02),
}


def batch(step):
    """This rank's inputs and targets in that step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(64, 32, generator=generator)
    return inputs, inputs[:, :4].sum(1, keepdim=True).sin()


def train(algorithm, steps):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)
    )
    ddp = DistributedDataParallel(model)
    hook = comm_hooks.register(ddp, ALGORITHMS[algorithm])  # on every rank, after DDP
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = mse_loss(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
    sent = hook.stats()["total"]["bytes_sent"] / steps
    if dist.get_rank() == 0:
        print(f"{algorithm}: loss {loss.item():.4f}, {sent:.0f} bytes sent per step and rank")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="bytegrad", choices=ALGORITHMS)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    train(arguments.algorithm, arguments.steps)
    dist.destroy_process_group()
