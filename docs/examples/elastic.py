"""Local training that goes on when ranks are killed, and takes them in again when they come back.

One agent for each machine, here of three; the first one's also serves the store, which outlives
ranks. The same on all, but --node-rank:

    torchrun --nnodes=3 --node-rank=0 --nproc_per_node=1 --max-restarts=100 \
        --master-addr=10.0.0.1 --master-port=29500 docs/examples/elastic.py

Three things make it so: init_process_group(elastic=True), an algorithm with elastic=True, and a
loop that ends with a number of outer rounds, since a rank that comes back makes fewer steps.
"""

import argparse
from datetime import timedelta

import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import DiLoCoAlgorithm
from torch import nn
from torch.nn.functional import mse_loss


def batch(rounds, step):
    """This rank's inputs and targets; with a DataLoader: seed by the rank and the outer rounds."""
    seed = 100_000 * rounds + 100 * step + bagua.get_rank()
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.sum(1, keepdim=True).sin()


def train(rounds, interval):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # A rank that comes back waits here for the others' next round.
    model = bagua.wrap(model, [optimizer], DiLoCoAlgorithm(interval=interval, elastic=True))
    algorithm = model.bagua_algorithm
    step, made, members = 0, algorithm.outer_rounds, model.process_group.ranks
    print(f"begins after {made} outer rounds, ranks {members}", flush=True)
    while made < rounds:
        inputs, targets = batch(made, step)
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        step += 1
        if algorithm.outer_rounds > made:
            step, made = 0, algorithm.outer_rounds
            if made % 10 == 0:
                print(f"round {made}: loss {loss.item():.4f}, {model.process_group}", flush=True)
    with algorithm.anchor():  # equal on all ranks: to evaluate and to save
        if model.process_group.rank == 0:
            torch.save(model.state_dict(), "elastic.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--interval", type=int, default=20)
    arguments = parser.parse_args()
    bagua.init_process_group(timeout=timedelta(minutes=2), elastic=True)
    train(arguments.rounds, arguments.interval)
