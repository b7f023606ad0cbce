"""Islands that are pipelines of two stages each, and meet after some steps in 4 bits.

Each node is an island, here of two ranks. The same on all, but --node-rank:

    torchrun --nnodes=2 --node-rank=0 --nproc_per_node=2 --master-addr=10.0.0.1 \
        --master-port=29500 docs/examples/pipeline_islands.py

The images are scikit-learn's own (8x8 grey values, no download); an island trains on its share of
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
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

BATCH, STAGES = 32, 2


def train(rounds, interval, folder):
    """Returns what the run achieved; the last stage knows the accuracy."""
    # 1. Inside of an island torch passes microbatches from stage to stage.
    shape = (dist.get_world_size() // STAGES, STAGES)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("island", "stage"))
    island, own = mesh.get_local_rank("island"), mesh.get_local_rank("stage")
    last = own == STAGES - 1
    torch.manual_seed(0)
    part = nn.Linear(256, 10) if last else nn.Sequential(nn.Linear(64, 256), nn.ReLU())
    stage = PipelineStage(part, own, STAGES, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.002)
    # 2. A stage meets the same stage of other islands.
    algorithm = DiLoCoAlgorithm(interval=interval, codec="int4_block")
    part = bagua.wrap(part, [optimizer], algorithm, process_group=mesh["island"])
    algorithm = part.bagua_algorithm

    # Stages may give other parameters the same names: in a checkpoint each has separate keys.
    state = {f"stage{own}/training": PerRank(part), f"stage{own}/algorithm": algorithm}
    if folder is not None and folder.exists():
        dcp.load(state, checkpoint_id=folder)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16  # [1797, 64]
    labels = torch.tensor(data.target)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = shuffled[: 12 * BATCH]
    of_island = shuffled[12 * BATCH :][island :: shape[0]]

    def run(step, batch):
        """The scores in the last stage: the first needs images, the last their labels."""
        inputs = [images[batch]] if own == 0 else []
        return step(*inputs, target=labels[batch] if last else None)

    while algorithm.outer_rounds < rounds:
        # Both stages of an island draw the same images.
        generator = torch.Generator().manual_seed(1000 * algorithm.outer_rounds + island)
        for batch in torch.randint(len(of_island), (interval, BATCH), generator=generator):
            optimizer.zero_grad()
            run(schedule.step, of_island[batch])
            optimizer.step()
    if folder is not None:
        dcp.save(state, checkpoint_id=folder)

    right = 0
    with algorithm.anchor(), torch.no_grad():  # equal in all islands
        for batch in held_out.split(BATCH):
            scores = run(schedule.eval, batch)
            right += (scores.argmax(1) == labels[batch]).sum().item() if last else 0
        weights = sum(p.double().abs().sum().item() for p in part.parameters())
    return {
        "stage": own,
        "accuracy": right / len(held_out) if last else None,
        "bytes_per_round": part.bagua_stats()["total"]["bytes_sent"] / rounds,  # of this rank
        "weights": weights,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--interval", type=int, default=20, help="steps from round to round")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and go on from")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    result = train(*vars(arguments).values())
    print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
