"""What bench_step.py compares: one model, trained one step at a time in several ways.

The model is VGG-like: convolutions 32-64-128 and fully connected layers 2048-2048-2048-100, images
of 3x32x32, batch 16: 8.7 million parameters. Only public interfaces are used.
"""

import copy
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH = 16
CLASSES = 100


def make_model():
    layers = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for outputs in (2048, 2048):
        layers += [nn.Linear(2048, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, CLASSES))


def wrap_with_ddp(model, optimizer):
    return DistributedDataParallel(model)


def wrap_with_ddp_fp16(model, optimizer):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def wrap_with_bagua(name):
    def wrap(model, optimizer):
        import bagua.torch_api as bagua

        if not bagua.communication.is_initialized():
            bagua.init_process_group()
        algorithm = bagua.algorithms.Algorithm.init(name, hierarchical=False)
        return model.with_bagua([optimizer], algorithm)

    return wrap


ARMS = {
    "compute": lambda model, optimizer: model,
    "ddp": wrap_with_ddp,
    "ddp_fp16": wrap_with_ddp_fp16,
    "gradient_allreduce": wrap_with_bagua("gradient_allreduce"),
    "bytegrad": wrap_with_bagua("bytegrad"),
}


class Arm:
    """A copy of the model under one way of training; ``step`` is what is timed."""

    def __init__(self, name, model):
        self.name = name
        self.module = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.001)
        self.wrapped = ARMS[name](self.module, self.optimizer)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn(BATCH, 3, 32, 32, generator=generator)
        self.labels = torch.randint(CLASSES, (BATCH,), generator=generator)

    def step(self):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.wrapped(self.images), self.labels)
        loss.backward()
        self.optimizer.step()

    def seconds_per_step(self, steps):
        """Mean over consecutive steps that all ranks start together."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - start) / steps

    def bytes_sent(self):
        """By this rank so far, as the engine counted; None where nothing counts."""
        if not hasattr(self.wrapped, "bagua_stats"):
            return None
        return self.wrapped.bagua_stats()["total"]["bytes_sent"]

    def check(self, reference):
        """Ranks hold the same bits, close to those of the arm that is known to be right."""
        flat = torch.cat([parameter.detach().flatten() for parameter in self.module.parameters()])
        own = flat.view(torch.int32).sum(dtype=torch.int64)
        sums = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(sums, own)
        if any(other != own for other in sums):
            raise RuntimeError(f"{self.name}: ranks hold different parameters")
        expected = torch.cat([p.detach().flatten() for p in reference.module.parameters()])
        error = ((flat - expected).norm() / expected.norm()).item()
        if not error < 1e-3:
            raise RuntimeError(f"{self.name}: parameters are {error:.1e} from those of DDP")


def seconds_of_bulk_all_reduce(numel):
    """The least time that the network needs to all_reduce the model in one piece."""
    tensor = torch.zeros(numel)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - start


def measure(names, pairs, steps):
    """Times all arms in turn, ``pairs`` times, in alternating order; returns rank 0's figures.

    Ratios are medians over the rounds of the ratio within a round, so that a machine that is slower
    for a while slows both sides.
    """
    torch.manual_seed(0)
    model = make_model()
    numel = sum(parameter.numel() for parameter in model.parameters())
    arms = {name: Arm(name, model) for name in names}
    for arm in arms.values():
        arm.seconds_per_step(2)  # warm-up: buckets are laid out anew after the first step
    sent_before = {name: arm.bytes_sent() for name, arm in arms.items()}

    seconds = {name: [] for name in names}
    bulk = []
    for pair in range(pairs):
        for name in names if pair % 2 == 0 else reversed(names):
            seconds[name].append(arms[name].seconds_per_step(steps))
        bulk.append(seconds_of_bulk_all_reduce(numel))
    for name, arm in arms.items():
        if name not in ("compute", "ddp") and "ddp" in arms:
            arm.check(arms["ddp"])

    dense = 2 * 4 * numel * (dist.get_world_size() - 1) / dist.get_world_size()
    sent = {"compute": 0, "ddp": dense, "ddp_fp16": dense / 2}
    for name, before in sent_before.items():
        if before is not None:
            sent[name] = (arms[name].bytes_sent() - before) / (pairs * steps)
    return {
        "parameters": numel,
        "pairs": pairs,
        "steps_per_measurement": steps,
        "bulk_all_reduce_seconds": statistics.median(bulk),
        "goodput_bytes_per_second": dense / statistics.median(bulk),
        "arms": {name: summarise(name, seconds, bulk, sent[name] / dense) for name in names},
        "bytes_sent_per_step": {name: sent[name] for name in names},
    }


def summarise(name, seconds, bulk, share_of_dense):
    """``to_bound`` is the time over the least possible: max(compute, bytes sent / bulk goodput)."""
    figures = {
        "median_seconds": statistics.median(seconds[name]),
        "min_seconds": min(seconds[name]),
    }
    if "ddp" in seconds:
        figures["speed_over_ddp"] = median_ratio(seconds["ddp"], seconds[name])
    if "compute" in seconds:
        bounds = [max(c, b * share_of_dense) for c, b in zip(seconds["compute"], bulk, strict=True)]
        figures["to_bound"] = median_ratio(seconds[name], bounds)
    return figures


def median_ratio(above, below):
    return statistics.median(a / b for a, b in zip(above, below, strict=True))
