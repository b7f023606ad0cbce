"""The ranks of bench_foresight.py: one network, its figures, and measured steps of all arms.

The model is VGG-like: convolutions 32-64-128 and fully connected layers 2048-1024-1024-100, images
of 3x32x32, batch 16: 3.4 million parameters.
"""

import copy
import statistics
import time
from dataclasses import asdict, dataclass, field

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua._foresight.probe import links, speeds
from bagua._foresight.probe.steps import StepProbe
from bagua.torch_api.algorithms import Algorithm
from torch import nn
from torch.nn.functional import cross_entropy

BATCH = 16
CLASSES = 100
CODECS = ("block_uint8", "int4_block")
FLAT = {"hierarchical": False}
#: Seconds of steps before a measurement that are not counted. Arms take turns, and a connection
#: that was idle begins slowly: congestion control (BBR, and after a time-out any) has forgotten
#: what the link carries. A training does not pause so.
WARM_UP_SECONDS = 1.0


@dataclass(frozen=True)
class Arm:
    """An algorithm. ``least_seconds`` of a measurement; ``cycle``: steps that belong together.

    With one peer a step and an odd number of ranks as many as there are ranks belong together, too.
    """

    name: str
    algorithm: str
    arguments: dict = field(default_factory=dict)
    least_seconds: float = 0.0
    cycle: int = 1


ARMS = [
    Arm("exact", "gradient_allreduce"),
    Arm("bytegrad", "bytegrad", FLAT),
    Arm(
        "bytegrad, 4 bits",
        "bytegrad",
        {**FLAT, "codec": "int4_block", "error_feedback": True},
    ),
    Arm("power_sgd", "power_sgd", {"rank": 4}),
    Arm("sparse", "sparse"),
    Arm("decentralized", "decentralized", {**FLAT, "peer_selection_mode": "shift_one"}),
    Arm("low precision", "low_precision_decentralized", FLAT),
    Arm("async", "async", {"sync_interval_ms": 200}, least_seconds=2.5),
    Arm("diloco", "diloco", {"interval": 10}, cycle=10),
]


def make_model():
    layers = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, CLASSES))


class Training:
    """A copy of the model under an arm; None: by itself."""

    def __init__(self, arm, model):
        self.arm = arm
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)
        if arm is not None:
            algorithm = Algorithm.init(arm.algorithm, **arm.arguments)
            self.model = self.model.with_bagua([self.optimizer], algorithm)
        ranks = dist.get_world_size()
        odd = arm is not None and arm.algorithm == "decentralized" and ranks % 2
        self.cycle = ranks if odd else 1 if arm is None else arm.cycle
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn(BATCH, 3, 32, 32, generator=generator)
        self.labels = torch.randint(CLASSES, (BATCH,), generator=generator)

    def step(self):
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()

    def seconds_per_step(self, steps, least=0.0):
        """Mean over steps that all ranks start together; this rank's. ``least``: seconds."""
        asynchronous = self.arm is not None and self.arm.algorithm == "async"
        if asynchronous:
            self.model.bagua_algorithm.resume(self.model)
        dist.barrier()
        start, done = time.perf_counter(), 0
        while done < steps or time.perf_counter() - start < least:
            self.step()
            done += 1
        seconds = (time.perf_counter() - start) / done
        if asynchronous:
            self.model.bagua_algorithm.abort(self.model)
        return seconds

    def bytes_sent(self):
        return self.model.bagua_stats()["total"]["bytes_sent"]


def mean_of_ranks(values):
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers)
    return (numbers / dist.get_world_size()).tolist()


def host_figures(model):
    """A profile's figures of a rank that works beside all others, without communication."""
    training = Training(None, model)
    named = list(training.model.named_parameters())
    probe = StepProbe(named)
    dist.barrier()
    while not probe.done:
        probe.step_begins()
        training.step()
    times = probe.times()
    names = [name for name, _ in named]
    compute, optimizer, square, *ready = mean_of_ranks(
        [
            times.compute,
            times.optimizer,
            times.compute**2 * (1 + times.spread**2),
            *(times.ready[name] for name in names),
        ]
    )
    numel, figures = sum(p.numel() for _, p in named), []
    for measured in (
        lambda: [speeds.copy_speed()],
        *(lambda name=name: [*asdict(speeds.codec_speed(name, numel)).values()] for name in CODECS),
        lambda: [speeds.top_k_speed(numel)],
        lambda: [speeds.low_rank_speed(communicator(), 2048, numel // 2048)],
    ):
        dist.barrier()
        figures.append(mean_of_ranks(measured()))
    copies, *codecs, top_k, low_rank = figures
    return {
        "compute": compute,
        "optimizer": optimizer,
        "spread": max(0.0, square / compute**2 - 1) ** 0.5,
        "ready": dict(zip(names, ready, strict=True)),
        "copy": copies[0],
        "codecs": dict(zip(CODECS, codecs, strict=True)),
        "speeds": {"top_k": top_k[0], "low_rank": low_rank[0]},
    }


def communicator():
    return bagua.communication.get_default_group().connections.main_communicator("cpu")


def buckets_of(training):
    """(names, numel, bytes) of the buckets of gradients."""
    ddp = training.model.bagua_ddp
    names = {id(p): name for name, p in training.model.named_parameters()}
    sizes = {name: p.numel() for name, p in training.model.named_parameters()}
    found = []
    for bucket in ddp.bagua_buckets:
        members = [names[id(tensor)] for tensor in bucket.tensors]
        numel = sum(sizes[name] for name in members)
        found.append((members, numel, 4 * numel))
    return found


def measure(turns, budget):
    """The figures of this network; ``budget``: seconds for an arm's measurements."""
    torch.manual_seed(0)
    model = make_model()
    host = host_figures(model)
    link = links.link_of(communicator())
    figures = {
        "host": host,
        "link": asdict(link),
        "round": links.round_of(communicator()),
        "shares_memory": communicator().shares_memory,
        "shapes": {name: list(p.shape) for name, p in model.named_parameters()},
        "steps": {},
    }
    trainings = [Training(None, model), *(Training(arm, model) for arm in ARMS)]
    figures["buckets"] = buckets_of(trainings[1])
    for training in trainings:
        cycle = training.cycle
        training.seconds_per_step(2 * cycle)
        (seconds,) = mean_of_ranks([training.seconds_per_step(cycle)])

        def steps_of(some, seconds=seconds * cycle, cycle=cycle):
            return min(max(1, round(some / seconds)) * cycle, max(30, cycle))

        training.steps, training.warm_up = steps_of(budget / turns), steps_of(WARM_UP_SECONDS)
    seconds = {id(training): [] for training in trainings}
    for turn in range(turns):
        for training in trainings if turn % 2 == 0 else reversed(trainings):
            least = 0.0 if training.arm is None else training.arm.least_seconds
            if training.arm is not None:
                training.seconds_per_step(training.warm_up)
            found = training.seconds_per_step(training.steps, least)
            seconds[id(training)] += mean_of_ranks([found])
    for training in trainings:
        name = "compute" if training.arm is None else training.arm.name
        median = statistics.median(seconds[id(training)])
        figures["steps"][name] = {"seconds": median, "all": seconds[id(training)]}
    return figures
