"""Arms of bench_step.py: one model, trained in several ways.

The model is VGG-like: convolutions 32-64-128 and fully connected layers 2048-2048-2048-100, images
of 3x32x32, batch 16: 8.7 million parameters. Only public interfaces are used.
"""

import copy
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH = 16
CLASSES = 100


def make_model(width=2048):
    """``width``: of the fully connected layers."""
    layers = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for inputs in (2048, width):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.001)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.0001)


def qadam(parameters):
    from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

    # After so short a warm-up many second moments are almost zero: eps keeps steps finite.
    return QAdamOptimizer(parameters, lr=0.0001, warmup_steps=WARM_UP, eps=1e-3)


def bare(model, optimizer):
    return model


def ddp(model, optimizer):
    return DistributedDataParallel(model)


def ddp_fp16(model, optimizer):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def ddp_powersgd(model, optimizer):
    """torch's hook, rank 1, with a single bucket: with several it crashes on gloo."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)

    def bytes_sent(steps):
        ranks = dist.get_world_size()
        numel = state.total_numel_after_compression + steps * vectors
        return 4 * numel * 2 * (ranks - 1) / ranks

    wrapped.bytes_sent = bytes_sent
    return wrapped


def bagua_with(name, **arguments):
    def wrap(model, optimizer):
        import bagua.torch_api as bagua

        if not bagua.communication.is_initialized():
            bagua.init_process_group()
        if name == "qadam":
            arguments["q_adam_optimizer"] = optimizer
        algorithm = bagua.algorithms.Algorithm.init(name, **arguments)
        return model.with_bagua([optimizer], algorithm)

    return wrap


def hooked(name, **arguments):
    """torch's DistributedDataParallel with one of bagua's communication hooks."""

    def wrap(model, optimizer):
        from bagua import comm_hooks
        from bagua.torch_api.algorithms import Algorithm

        wrapped = DistributedDataParallel(model)
        handle = comm_hooks.register(wrapped, Algorithm.init(name, **arguments))
        wrapped.bytes_sent = lambda steps: handle.stats()["total"]["bytes_sent"]
        return wrapped

    return wrap


def now(device):
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def started_together(device):
    """Now, on all ranks at once."""
    now(device)
    dist.barrier()
    return now(device)


#: Steps of every arm before anything is timed; QAdam compresses after them.
WARM_UP = 2


@dataclass
class Way:
    """A way of training. ``peer``: the arm that is known to be right, and whose speed is 1."""

    wrap: object
    make_optimizer: object = sgd
    peer: str = "ddp"
    same_bits: bool = True  # on all ranks, after every step
    like_peer: bool = True  # weights are close to the peer's
    least_seconds: float = 0.0  # of one measurement
    round_of: int = 1  # steps, of which a measurement takes whole rounds


FLAT = {"hierarchical": False}
COMPRESSED = {"like_peer": False}
OWN_WEIGHTS = {"same_bits": False, "like_peer": False}

ARMS = {
    "compute": Way(bare, **OWN_WEIGHTS),
    "ddp": Way(ddp),
    "ddp_fp16": Way(ddp_fp16),
    "gradient_allreduce": Way(bagua_with("gradient_allreduce", **FLAT)),
    "bytegrad": Way(bagua_with("bytegrad", **FLAT)),
    "bytegrad_int4": Way(
        bagua_with("bytegrad", codec="int4_block", error_feedback=True, **FLAT), **COMPRESSED
    ),
    "exact_nodes": Way(bagua_with("gradient_allreduce", hierarchical=True)),
    "bytegrad_nodes": Way(bagua_with("bytegrad", hierarchical=True)),
    "hook_exact": Way(hooked("gradient_allreduce", **FLAT)),
    "hook_bytegrad": Way(hooked("bytegrad", **FLAT)),
    "hook_power_sgd": Way(hooked("power_sgd", rank=1, warmup_steps=0), **COMPRESSED),
    "decentralized": Way(
        bagua_with("decentralized", peer_selection_mode="shift_one", **FLAT), **OWN_WEIGHTS
    ),
    "low_precision": Way(bagua_with("low_precision_decentralized", **FLAT), **OWN_WEIGHTS),
    "low_precision_2": Way(
        bagua_with("low_precision_decentralized", communication_interval=2, **FLAT), **OWN_WEIGHTS
    ),
    "ddp_powersgd": Way(ddp_powersgd, **COMPRESSED),
    "power_sgd": Way(bagua_with("power_sgd", rank=1, warmup_steps=0), **COMPRESSED),
    "power_sgd_4": Way(bagua_with("power_sgd", rank=4, warmup_steps=0), **COMPRESSED),
    "sparse": Way(bagua_with("sparse", ratio=0.01), **COMPRESSED),
    "ddp_adam": Way(ddp, adam, peer="ddp_adam"),
    "qadam": Way(bagua_with("qadam", **FLAT), qadam, peer="ddp_adam", like_peer=False),
    "diloco_int4": Way(
        bagua_with("diloco", codec="int4_block", interval=20, overlap_steps=10),
        **OWN_WEIGHTS,
        round_of=20,
    ),
    "async": Way(bagua_with("async", sync_interval_ms=500), **OWN_WEIGHTS, least_seconds=8.0),
}


class Arm:
    """A copy of the model under one way of training; ``step`` is what is timed."""

    def __init__(self, name, model, pause=0.0):
        self.name = name
        self.pause = pause  # seconds of a step in which a GPU would compute, before its backward
        self.way = ARMS[name]
        self.device = next(model.parameters()).device
        self.module = copy.deepcopy(model)
        self.optimizer = self.way.make_optimizer(self.module.parameters())
        self.wrapped = self.way.wrap(self.module, self.optimizer)
        self.steps = 0
        self.averages = []  # (seconds, averages applied) of every measurement of "async"
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn(BATCH, 3, 32, 32, generator=generator).to(self.device)
        self.labels = torch.randint(CLASSES, (BATCH,), generator=generator).to(self.device)

    def step(self):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.wrapped(self.images), self.labels)
        time.sleep(self.pause)
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    def seconds_per_step(self, steps):
        """Mean over steps that all ranks start together, and over whole rounds."""
        steps = -(-steps // self.way.round_of) * self.way.round_of
        if self.name == "async":
            return self.seconds_beside_averages(steps)
        start = started_together(self.device)
        for _ in range(steps):
            self.step()
        return (now(self.device) - start) / steps

    def seconds_beside_averages(self, steps):
        """Averaging runs while this arm is timed, and only then."""
        algorithm = self.wrapped.bagua_algorithm
        algorithm.resume(self.wrapped)
        start = started_together(self.device)
        before, done = self.averages_applied(), 0
        while done < steps or time.perf_counter() - start < self.way.least_seconds:
            self.step()
            done += 1
        seconds = now(self.device) - start
        self.averages.append((seconds, self.averages_applied() - before))
        algorithm.abort(self.wrapped)
        return seconds / done

    def averages_applied(self):
        return self.wrapped.bagua_stats()["rounds"]

    def bytes_sent(self):
        """By this rank so far, as the engine counted; None where nothing counts."""
        if hasattr(self.wrapped, "bytes_sent"):
            return self.wrapped.bytes_sent(self.steps)
        if not hasattr(self.wrapped, "bagua_stats"):
            return None
        return self.wrapped.bagua_stats()["total"]["bytes_sent"]

    def check(self, arms):
        """The weights are what this way of training promises, or RuntimeError."""
        flat = torch.cat([parameter.detach().flatten() for parameter in self.module.parameters()])
        if not flat.isfinite().all():
            raise RuntimeError(f"{self.name}: parameters are not finite")
        own = flat.view(torch.int32).sum(dtype=torch.int64)
        sums = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(sums, own)
        if self.way.same_bits and any(other != own for other in sums):
            raise RuntimeError(f"{self.name}: ranks hold different parameters")
        if not self.way.like_peer or self.way.peer not in arms:
            return
        peer = arms[self.way.peer].module
        expected = torch.cat([p.detach().flatten() for p in peer.parameters()])
        error = ((flat - expected).norm() / expected.norm()).item()
        if not error < 1e-3:
            raise RuntimeError(f"{self.name}: parameters are {error:.1e} from {self.way.peer}'s")
