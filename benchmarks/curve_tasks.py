"""The tasks of curves.py: real data, a model, its optimizer and what is measured on held-out data.

Every rank trains on its own share. Data comes from this machine: scikit-learn's digits, the sources
of Python's standard library, and Fashion-MNIST from a folder with its four .gz files (Debian:
dataset-fashion-mnist).
"""

import gzip
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn.functional import cross_entropy

FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
WINDOW = 64  # bytes that the transformer sees


class DataUnavailableError(RuntimeError):
    """Data of a task is not on this machine; the message says how to get it."""


@dataclass(frozen=True)
class Task:
    """A training run.

    data: (rank, ranks) -> (train inputs, train targets, held-out inputs, held-out targets).
    optimizer: parameters -> optimizer. qadam: arguments of QAdamOptimizer instead.
    """

    title: str
    data: Callable[[int, int], tuple[torch.Tensor, ...]]
    make_model: Callable[[], nn.Module]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    qadam: dict[str, float]
    batch: int
    steps: int
    clip: float | None = None


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def evaluate(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    """(loss, accuracy) on held-out data."""
    was_training = model.training
    model.eval()
    losses, right = 0.0, 0
    with torch.no_grad():
        for part, answers in zip(inputs.split(500), targets.split(500), strict=True):
            scores = model(part).flatten(0, -2)
            losses += cross_entropy(scores, answers.flatten(), reduction="sum").item()
            right += int((scores.argmax(1) == answers.flatten()).sum())
    model.train(was_training)
    return losses / targets.numel(), right / targets.numel()


# Digits.


def digits_data(rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
    """As in the demo: rank r trains on the digits d with d % ranks == r."""
    from digits import split_digits

    return split_digits(rank, ranks)


def digits_model() -> nn.Module:
    from digits import make_model

    return make_model()


# Fashion-MNIST.


def fashion_data(rank: int, ranks: int, folder: str = FASHION_MNIST) -> tuple[torch.Tensor, ...]:
    def read(name: str, header: int) -> numpy.ndarray:
        path = Path(folder) / f"{name}.gz"
        if not path.exists():
            raise DataUnavailableError(
                f"{path} is not there. Install Debian's dataset-fashion-mnist, or give the folder "
                "of the four .gz files with --fashion-mnist; --tasks leaves the task out."
            )
        with gzip.open(path) as file:
            return numpy.frombuffer(file.read(), numpy.uint8, offset=header).copy()

    def images(name: str) -> torch.Tensor:
        pixels = torch.from_numpy(read(f"{name}-images-idx3-ubyte", 16))
        return (pixels.view(-1, 1, 28, 28).float() / 255 - 0.286) / 0.353

    def labels(name: str) -> torch.Tensor:
        return torch.from_numpy(read(f"{name}-labels-idx1-ubyte", 8)).long()

    held_out = 3000  # of 10 000: evaluations shall not cost more than training
    share = slice(rank, None, ranks)
    return (
        images("train")[share],
        labels("train")[share],
        images("t10k")[:held_out],
        labels("t10k")[:held_out],
    )


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def residual_network() -> nn.Module:
    return nn.Sequential(
        Residual(1, 16, 2),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


# Bytes of Python sources.


def text_data(rank: int, ranks: int, megabytes: float = 3.0) -> tuple[torch.Tensor, ...]:
    """Windows of 65 bytes; the last 200 kB are held out."""
    text, folder = bytearray(), Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
    if len(text) < 1_000_000:
        raise DataUnavailableError(f"{folder} has no sources of Python's standard library")
    codes = torch.frombuffer(text[: int(megabytes * 1e6)], dtype=torch.uint8).long()
    windows = codes[: codes.numel() // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
    held_out = 200_000 // (WINDOW + 1)
    train, test = windows[:-held_out], windows[-held_out:][:1000]
    share = train.chunk(ranks)[rank]  # whole files: ranks see different sources
    return share[:, :-1], share[:, 1:], test[:, :-1], test[:, 1:]


class Transformer(nn.Module):
    """Byte-level, 4 layers of width 128: 0.86 million parameters."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.symbol = nn.Embedding(256, width)
        self.place = nn.Embedding(WINDOW, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.symbol(codes) + self.place.weight[: codes.shape[1]]
        return self.head(self.layers(x, mask=self.mask, is_causal=True))


def sgd(lr: float) -> Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9)


sys.path.append(str(Path(__file__).resolve().parents[1] / "docs/examples"))  # digits.py
TASKS = {
    "digits": Task(
        "Handwritten digits, a convolutional network, SGD; each rank sees some digits only",
        digits_data,
        digits_model,
        sgd(0.05),
        qadam={"lr": 0.002, "eps": 1e-3},
        batch=32,
        steps=440,
    ),
    "fashion": Task(
        "Fashion-MNIST, a residual network with batch normalisation, SGD",
        fashion_data,
        residual_network,
        sgd(0.05),
        qadam={"lr": 0.001, "eps": 1e-3},
        batch=64,
        steps=600,
    ),
    "text": Task(
        "Bytes of Python's standard library, a transformer, AdamW",
        text_data,
        Transformer,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        qadam={"lr": 1e-3},
        batch=8,
        steps=800,
        clip=1.0,
    ),
}
