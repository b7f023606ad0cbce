"""Handwritten digits with Hugging Face Accelerate: one line more than without bagua.

    torchrun --nproc_per_node=2 docs/examples/integrations/accelerate_digits.py --algorithm bytegrad

The images are scikit-learn's own (8x8 grey values, no download).
"""

import argparse
import hashlib
import json

import torch
from accelerate import Accelerator
from bagua.integrations.accelerate import use
from bagua.torch_api.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

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
    accelerator = Accelerator(cpu=True)
    hooks = use(accelerator, ALGORITHMS[algorithm])  # the only change, before prepare()
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(epochs):
        for batch, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(batch), targets))
            optimizer.step()
    with torch.no_grad():
        accuracy = (net(images).argmax(1) == labels).float().mean().item()
    weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    return {
        "rank": accelerator.process_index,
        "accuracy": accuracy,
        "bytes_sent": hooks.stats()["total"]["bytes_sent"],
        "weights": hashlib.sha256(weights).hexdigest(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="bytegrad", choices=ALGORITHMS)
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    print(json.dumps(train(arguments.algorithm, arguments.epochs)))
