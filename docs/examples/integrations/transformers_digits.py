"""Handwritten digits with transformers' Trainer: one line more than without bagua.

    torchrun --nproc_per_node=2 docs/examples/integrations/transformers_digits.py

The images are scikit-learn's own (8x8 grey values, no download).
"""

import argparse
import hashlib
import json
import tempfile

import torch
from bagua.integrations.transformers import use
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
)
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

ALGORITHMS = {
    "exact": GradientAllReduceAlgorithm(),
    "bytegrad": ByteGradAlgorithm(),
    "diloco": DiLoCoAlgorithm(interval=20, codec="int4_block"),
}


def digits():
    """Training data, and images and labels held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:400], order[400:]
    examples = [{"images": images[i], "labels": labels[i]} for i in train]
    return examples, images[held_out], labels[held_out]


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, images, labels):
        logits = self.net(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def train(algorithm, epochs, folder):
    examples, images, labels = digits()
    torch.manual_seed(0)
    model = Digits()
    arguments = TrainingArguments(
        folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=examples)
    hooks = use(trainer, ALGORITHMS[algorithm])  # the only change, before train()
    trainer.train()
    with torch.no_grad():
        accuracy = (model.net(images).argmax(1) == labels).float().mean().item()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return {
        "rank": arguments.process_index,
        "accuracy": accuracy,
        "bytes_sent": hooks.stats()["total"]["bytes_sent"],
        "weights": hashlib.sha256(weights).hexdigest(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="bytegrad", choices=ALGORITHMS)
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(train(options.algorithm, options.epochs, folder)))
