"""Models in torch's DistributedDataParallel, with or without a communication hook."""

import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import ByteGradAlgorithm, PowerSGDAlgorithm, SparseAlgorithm
from support import training
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
SMALL = {"bucket_cap_mb": 0.004}
ALONE = {"bucket_cap_mb": 1e-5}  # every parameter has a separate bucket

ALGORITHMS = {
    "bytegrad": lambda: ByteGradAlgorithm(hierarchical=False),
    "power_sgd": lambda: PowerSGDAlgorithm(2, min_compression_rate=1.0, warmup_steps=0),
    "sparse": lambda: SparseAlgorithm(0.05),
}


class Branches(nn.Module):
    """Two ways from the input to the output, of which a step may use one only."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 40)
        self.left, self.right = nn.Linear(40, 24), nn.Linear(40, 24)
        self.head = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 3))

    def forward(self, inputs, ways="lr"):
        stem = self.stem(inputs).tanh()
        ways = [{"l": self.left, "r": self.right}[way](stem) for way in ways]
        return self.head(torch.stack(ways).sum(0).tanh())


class Mixed(nn.Module):
    """Parameters of three dtypes, so of three kinds of buckets."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 40)
        self.second = nn.Linear(40, 24).bfloat16()
        self.third = nn.Linear(24, 3).double()

    def forward(self, inputs):
        return self.third(self.second(self.first(inputs).tanh().bfloat16()).tanh().double())


class Complex(nn.Module):
    """A complex layer between real ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 40)
        self.second = nn.Linear(40, 24, dtype=torch.complex64)
        self.third = nn.Linear(24, 3)

    def forward(self, inputs):
        return self.third(self.second(self.first(inputs).to(torch.complex64)).abs().tanh())


class Images(nn.Module):
    """A convolution in channels_last, whose gradients lie in that order in the bucket."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (5, 1, 1)), nn.ConvTranspose2d(5, 12, 3), nn.Tanh(), nn.Conv2d(12, 8, 3)
        )
        self.head = nn.Sequential(nn.Linear(8, 20), nn.Linear(20, 3))
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs):
        return self.head(self.layers(inputs).flatten(1))


def network():
    return nn.Sequential(
        nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3)
    )


def loss_of(model, step, rank, *way):
    inputs, targets = training.batch(step, rank)
    output = model(inputs, *way)
    return nn.functional.mse_loss(output, targets.to(output.dtype))


def plain_step(ddp, step, *way):
    loss_of(ddp, step, dist.get_rank(), *way).backward()


def one_way(ddp, step):
    plain_step(ddp, step, "lr"[step % 2])


def ways_by_rank(ddp, step):
    plain_step(ddp, step, "lr"[(step + dist.get_rank()) % 2])


def accumulate(ddp, step):
    with ddp.no_sync():
        plain_step(ddp, 10 * step)
        plain_step(ddp, 10 * step + 1)
    plain_step(ddp, 10 * step + 2)


# Network, arguments, one step.
SITUATIONS = {
    "default": (network, {}, plain_step),
    "small_buckets": (network, SMALL, plain_step),
    "bucket_view": (network, {"gradient_as_bucket_view": True} | SMALL, plain_step),
    "static_graph": (network, {"static_graph": True} | SMALL, plain_step),
    "unused": (Branches, {"find_unused_parameters": True} | SMALL, one_way),
    "unused_by_some": (Branches, {"find_unused_parameters": True} | SMALL, ways_by_rank),
    "unused_and_skipped": (
        Branches,
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True} | ALONE,
        one_way,
    ),
    "accumulation": (network, SMALL, accumulate),
    "mixed_dtypes": (Mixed, SMALL, plain_step),
    "channels_last": (Images, SMALL, plain_step),
    "complex": (Complex, SMALL, plain_step),  # exact only
}


def made(situation, algorithm=None, **options):
    """A DistributedDataParallel, with a hook if there is an algorithm, its handle and optimizer."""
    make, arguments, _ = SITUATIONS[situation]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(make(), **arguments)
    handle = None if algorithm is None else comm_hooks.register(ddp, algorithm, **options)
    return ddp, handle, training.sgd(ddp)


def train(situation, ddp, optimizer, steps=STEPS):
    """The digests of the parameters and gradients after every step."""
    digests = []
    for step in range(steps):
        optimizer.zero_grad()
        SITUATIONS[situation][2](ddp, step)
        digests.append(training.model_bits(ddp))
        optimizer.step()
    return digests
