"""Handwritten digits with torch's own DistributedDataParallel and a hook for its gradients.

    torchrun --nproc_per_node=2 docs/examples/integrations/ddp_hook.py --algorithm bytegrad

The images are scikit-learn's own (8x8 grey values, no download).
"""

import argparse
import hashlib
import json

import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ALGORITHMS = {
    "exact": GradientAllReduceAlgorithm(),
    "bytegrad": ByteGradAlgorithm(),
}


def digits():
    """Training data, and images and labels held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:400], order[400:]
    return TensorDataset(images[train], labels[train]), images[held_out], labels[held_out]


def train(algorithm, epochs):
    data, images, labels = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    hook = comm_hooks.register(ddp, ALGORITHMS[algorithm])  # the only change
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            cross_entropy(ddp(batch), targets).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return {
        "rank": dist.get_rank(),
        "accuracy": accuracy,
        "bytes_sent": hook.stats()["total"]["bytes_sent"],
        "weights": hashlib.sha256(weights).hexdigest(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="bytegrad", choices=ALGORITHMS)
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    print(json.dumps(train(arguments.algorithm, arguments.epochs)))
    dist.destroy_process_group()
