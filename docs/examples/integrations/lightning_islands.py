"""Handwritten digits with Lightning: islands that shard a model, and meet in rounds.

    torchrun --nproc_per_node=4 docs/examples/integrations/lightning_islands.py

The images are scikit-learn's own (8x8 grey values, no download).
"""

import argparse
import json

import bagua.torch_api as bagua
import lightning as L
import torch
from bagua.torch_api.algorithms import DiLoCoAlgorithm
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

ISLANDS = 2


class Digits(L.LightningModule):
    def __init__(self, held_out):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.held_out = held_out
        self.result = {}

    def configure_model(self):  # inside of an island torch shards the model
        shape = (ISLANDS, self.trainer.world_size // ISLANDS)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("island", "shard"))
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=self.mesh["shard"])
        fully_shard(self.net, mesh=self.mesh["shard"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.002)

    def on_fit_start(self):  # the optimizer exists now; a rank meets those that hold its shard
        algorithm = DiLoCoAlgorithm(interval=10, codec="int4_block")
        optimizers = [self.optimizers().optimizer]
        bagua.wrap(self.net, optimizers, algorithm, process_group=self.mesh["island"])

    def training_step(self, batch, index):
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def on_train_end(self):
        images, labels = self.held_out
        self.net.bagua_algorithm.sync()  # the steps since the last round count, too
        with torch.no_grad():
            accuracy = (self.net(images).argmax(1) == labels).float().mean().item()
        self.result = {
            "rank": self.trainer.global_rank,
            "accuracy": accuracy,
            "rounds": self.net.bagua_algorithm.outer_rounds,
            "bytes_sent": self.net.bagua_stats()["total"]["bytes_sent"],
        }


def train(epochs):
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, own = order[:400], order[400:]
    L.seed_everything(0, verbose=False)
    model = Digits((images[held_out], labels[held_out]))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(images[own], labels[own])
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True))
    return model.result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    print(json.dumps(train(parser.parse_args().epochs)))
