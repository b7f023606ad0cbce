"""Handwritten digits with Lightning: the strategy is the only change.

    python docs/examples/integrations/lightning_digits.py --algorithm bytegrad

The images are scikit-learn's own (8x8 grey values, no download).
"""

import argparse
import hashlib
import json

import lightning as L
import torch
from bagua.lightning import BaguaStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

STRATEGIES = {
    "exact": lambda: "bagua",
    "bytegrad": lambda: BaguaStrategy("bytegrad"),
}


def digits():
    """Training data, and images and labels held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:400], order[400:]
    return TensorDataset(images[train], labels[train]), images[held_out], labels[held_out]


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.bytes_sent = 0

    def training_step(self, batch, index):
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_end(self):  # trainer.strategy.model is bagua's wrapper while fit() runs
        stats = self.trainer.strategy.model.bagua_ddp.stats()
        self.bytes_sent = stats["total"]["bytes_sent"]


def train(algorithm, epochs):
    data, images, labels = digits()
    L.seed_everything(0, verbose=False)
    model = Digits()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=STRATEGIES[algorithm](),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
    with torch.no_grad():
        accuracy = (model.net(images).argmax(1) == labels).float().mean().item()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return {
        "rank": trainer.global_rank,
        "accuracy": accuracy,
        "bytes_sent": model.bytes_sent,
        "weights": hashlib.sha256(weights).hexdigest(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="bytegrad", choices=STRATEGIES)
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    print(json.dumps(train(arguments.algorithm, arguments.epochs)))
