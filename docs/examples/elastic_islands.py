"""Islands of ranks that shard a model inside; the others go on when one is lost, and take it back.

Each island is a separate job, here one machine of two. The first one's agent also serves the
store of all islands, which outlives ranks:

    torchrun --nproc_per_node=2 --max-restarts=100 --master-addr=10.0.0.1 --master-port=29500 \
        docs/examples/elastic_islands.py --store 10.0.0.1:29500 --islands 2 --island 0
    torchrun --nproc_per_node=2 --max-restarts=100 \
        docs/examples/elastic_islands.py --store 10.0.0.1:29500 --islands 2 --island 1

When a rank dies, torchrun ends and starts all of its island. The loop ends with a number of outer
rounds, since an island that comes back makes fewer steps.
"""

import argparse
from datetime import timedelta

import bagua.torch_api as bagua
import torch
from bagua.torch_api.algorithms import DiLoCoAlgorithm, Elastic
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss


def batch(island, rounds, step):
    """This rank's inputs and targets; with a DataLoader: seed by the same numbers."""
    place = island * bagua.get_world_size() + bagua.get_rank()
    generator = torch.Generator().manual_seed(100_000 * rounds + 100 * step + place)
    inputs = torch.randn(32, 8, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


def train(store, island, islands, rounds, interval):
    # 1. Inside: torch's world is the island.
    bagua.init_process_group(timeout=timedelta(minutes=2))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (bagua.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # 2. Between islands. One that comes back waits here for the others' next round.
    group = bagua.communication.connect_islands(store, island, islands)
    algorithm = DiLoCoAlgorithm(interval=interval, elastic=Elastic(quorum=1))
    model = bagua.wrap(model, [optimizer], algorithm, process_group=group)
    outer = model.bagua_algorithm
    step, made, first = 0, outer.outer_rounds, bagua.get_rank() == 0
    if first:
        print(f"begins after {made} outer rounds, islands {group.ranks}", flush=True)
    while made < rounds:
        inputs, targets = batch(island, made, step)
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        step += 1
        if outer.outer_rounds > made:
            step, made = 0, outer.outer_rounds
            if made % 10 == 0 and first:
                print(f"round {made}: loss {loss.item():.4f}, islands {group.ranks}", flush=True)
    with outer.anchor(), torch.no_grad():  # equal in all islands: to evaluate and to save
        inputs, targets = batch(0, 0, 0)
        print(f"anchor: loss {mse_loss(model(inputs), targets).item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", required=True, help="host:port of the store of all islands")
    parser.add_argument("--island", type=int, required=True, help="number of this one, from 0")
    parser.add_argument("--islands", type=int, required=True, help="that begin together")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--interval", type=int, default=20)
    train(**vars(parser.parse_args()))
