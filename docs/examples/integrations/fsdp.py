"""Trains a sharded model (FSDP2) on handwritten digits, with 8-bit gradients.

    torchrun --nproc_per_node=2 docs/examples/integrations/fsdp.py [--codec none]
    torchrun --nproc_per_node=4 docs/examples/integrations/fsdp.py --replicas 2

The images are scikit-learn's own (8x8 grey values, no download). Rank r trains on every image i
with i % world_size == r. With --checkpoint FOLDER the training goes on from the last epoch there.
With --replicas N there are N copies of the model (HSDP); between them gradients travel in 8 bits.
With --codec int4_block --residuals each rank keeps what compression has taken, and sends it later.
"""

import argparse
import json
from pathlib import Path

import bagua.fsdp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

BATCH = 32


def digits(rank, world_size):
    """(images, labels) that this rank trains on, and (images, labels) held out from all ranks."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16  # [1797, 64]
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:400], order[400:]
    own = train[: len(train) // world_size * world_size][rank::world_size]
    return images[own], labels[own], images[held_out], labels[held_out]


def make_model(replicas):
    mesh = None
    if replicas > 1:
        shape = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU()),
        nn.Sequential(nn.Linear(256, 256), nn.ReLU()),
        nn.Linear(256, 10),
    )
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def state_of(model, optimizer, compressed):
    """A checkpoint's; `compressed` loads its part, the residuals, by itself."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    if compressed is not None:
        state["fsdp"] = compressed
    return state


def train(codec, weights, epochs, folder, replicas, residuals):
    """Returns what the run achieved."""
    images, labels, test_images, test_labels = digits(dist.get_rank(), dist.get_world_size())
    model = make_model(replicas)
    compressed = None
    if codec != "none":
        options = {"weights": weights, "error_feedback": residuals}
        compressed = bagua.fsdp.compress(model, codec, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

    first = 0
    if folder is not None and (saved := sorted(folder.glob("epoch*"))):
        first = int(saved[-1].name.removeprefix("epoch"))
        state = state_of(model, optimizer, compressed)
        dcp.load(state, checkpoint_id=saved[-1])
        of_model, of_optimizer = state["model"], state["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)

    steps = 0
    for epoch in range(first, epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for batch in order[: len(order) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            steps += 1
        if folder is not None:
            state = state_of(model, optimizer, compressed)
            dcp.save(state, checkpoint_id=folder / f"epoch{epoch + 1:03}")

    with torch.no_grad():
        outputs = model(test_images)
        accuracy = (outputs.argmax(1) == test_labels).float().mean().item()
        loss = cross_entropy(outputs, test_labels).item()
    sent = 0
    if compressed is not None:
        buckets = compressed.stats()["buckets"]
        kinds = (".gradients", ".replicas")
        sent = sum(b["bytes_sent"] for b in buckets if b["name"].endswith(kinds))
    whole = [parameter.detach().full_tensor() for parameter in model.parameters()]
    return {
        "codec": codec,
        "accuracy": accuracy,
        "loss": loss,
        "steps": steps,
        "gradient_bytes_per_step": sent / max(1, steps),  # of this rank
        "parameters": sum(parameter.numel() for parameter in whole),
        "weights": sum(parameter.double().abs().sum().item() for parameter in whole),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="block_uint8", help="or none: exact gradients")
    parser.add_argument("--weights", action="store_true", help="gather weights in 8 bits, too")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="folder to save to and go on from")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model (HSDP)")
    parser.add_argument("--residuals", action="store_true", help="error feedback")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    result = train(
        arguments.codec,
        arguments.weights,
        arguments.epochs,
        arguments.checkpoint,
        arguments.replicas,
        arguments.residuals,
    )
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
