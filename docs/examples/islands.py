"""Islands of ranks that shard a model inside (FSDP2), and meet after some steps in 4 bits.

Each node is an island, here of two ranks. The same on all, but --node-rank:

    torchrun --nnodes=2 --node-rank=0 --nproc_per_node=2 --master-addr=10.0.0.1 \
        --master-port=29500 docs/examples/islands.py --islands 2

The images are scikit-learn's own (8x8 grey values, no download); a rank trains on its share of
them. With --checkpoint FOLDER, on a file system that all nodes see, the training goes on from
there.
"""

import argparse
import json
from pathlib import Path

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bagua.torch_api.algorithms import DiLoCoAlgorithm
from bagua.torch_api.checkpoint import PerRank
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

BATCH = 32


def digits():
    """(images, labels) that this rank trains on, and (images, labels) held out from all ranks."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16  # [1797, 64]
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    own = order[400:][dist.get_rank() :: dist.get_world_size()]
    return images[own], labels[own], images[order[:400]], labels[order[:400]]


def train(islands, rounds, interval, folder):
    """Returns what the run achieved."""
    # 1. Inside of an island torch shards the model.
    shape = (islands, dist.get_world_size() // islands)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("island", "shard"))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    # 2. A rank meets those that hold its shard in other islands.
    algorithm = DiLoCoAlgorithm(interval=interval, codec="int4_block")
    model = bagua.wrap(model, [optimizer], algorithm, process_group=mesh["island"])

    state = {"training": PerRank(model), "algorithm": model.bagua_algorithm}
    if folder is not None and folder.exists():
        dcp.load(state, checkpoint_id=folder)
    images, labels, test_images, test_labels = digits()
    while model.bagua_algorithm.outer_rounds < rounds:
        seed = 1000 * model.bagua_algorithm.outer_rounds + dist.get_rank()
        order = torch.randint(len(labels), (interval, BATCH), generator=generator(seed))
        for batch in order:
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    if folder is not None:
        dcp.save(state, checkpoint_id=folder)

    with model.bagua_algorithm.anchor(), torch.no_grad():  # equal in all islands
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    anchor = model.bagua_algorithm.state_dict()["anchor/2.weight"]
    return {
        "accuracy": accuracy,
        "bytes_per_round": model.bagua_stats()["total"]["bytes_sent"] / rounds,  # of this rank
        "weights": anchor.full_tensor().double().abs().sum().item(),
    }


def generator(seed):
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--interval", type=int, default=20, help="steps from round to round")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and go on from")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    result = train(*vars(arguments).values())
    print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
