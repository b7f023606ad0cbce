"""Training that goes on where it was: killed at any moment, it ends with the weights it would have.

    torchrun --nproc_per_node=2 --max-restarts=3 docs/examples/resume.py --folder checkpoints

Four things make it so: bagua.init_process_group() makes the group, load_latest() comes after
with_bagua, every rank calls save_checkpoint(), and what a step sees depends on its number alone.
"""

import argparse

import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from torch import nn
from torch.nn.functional import mse_loss


def batch(step):
    """This rank's inputs and targets in that step; with a DataLoader: seed and skip by the step."""
    generator = torch.Generator().manual_seed(1000 * step + bagua.get_rank())
    inputs = torch.randn(32, 8, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


def train(folder, algorithm, steps, save_every):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model = bagua.wrap(model, [optimizer], Algorithm.init(algorithm))

    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "algorithm": model.bagua_algorithm,
    }
    first = load_latest(folder, state) or 0
    for step in range(first, steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % save_every == 0 or step + 1 == steps:
            save_checkpoint(folder, state, step + 1)
            if bagua.get_rank() == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, help="seen by all ranks, of this training alone")
    parser.add_argument("--algorithm", default="power_sgd")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    arguments = parser.parse_args()
    bagua.init_process_group()
    train(arguments.folder, arguments.algorithm, arguments.steps, arguments.save_every)
