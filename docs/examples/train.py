"""A training loop with the usual parts: autocast, accumulation, clipping, a schedule, checkpoints.

torchrun --nproc_per_node=2 --max-restarts=3 docs/examples/train.py --folder checkpoints
"""

import argparse

import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import ByteGradAlgorithm
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from torch import nn
from torch.nn.functional import cross_entropy

ACCUMULATE = 2  # batches per step


def batch(number, seed):
    """Inputs of shape [64, 20] and their classes; a DataLoader with a DistributedSampler here."""
    generator = torch.Generator().manual_seed(seed + 1000 * number + bagua.get_rank())
    inputs = torch.randn(64, 20, generator=generator)
    return inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()


def evaluate(model):
    model.eval()
    with torch.no_grad():
        inputs, labels = batch(0, seed=1_000_000)
        correct = (model(inputs).argmax(1) == labels).float().mean()
    model.train()
    bagua.allreduce_inplace(correct, op=bagua.ReduceOp.AVG)  # over the ranks
    return correct.item()


def train(folder, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model = bagua.wrap(model, [optimizer], ByteGradAlgorithm())

    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "algorithm": model.bagua_algorithm,
    }
    first = load_latest(folder, state) or 0  # the newest step that all ranks have
    for step in range(first, steps):
        optimizer.zero_grad()
        for part in range(ACCUMULATE):
            model.require_backward_grad_sync = part == ACCUMULATE - 1  # as no_sync() does
            inputs, labels = batch(ACCUMULATE * step + part, seed=0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(inputs), labels)
            (loss / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the mean over the ranks
        optimizer.step()
        scheduler.step()
        if (step + 1) % 50 == 0:
            save_checkpoint(folder, state, step + 1)
            accuracy = evaluate(model)
            if bagua.get_rank() == 0:
                print(f"step {step + 1}: accuracy {accuracy:.3f}", flush=True)
    if bagua.get_rank() == 0:
        print(model.bagua_summary())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, help="seen by all ranks, of this training alone")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    bagua.init_process_group()
    train(arguments.folder, arguments.steps)
    bagua.destroy_process_group()
