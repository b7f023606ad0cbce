"""Golden trajectories: weights after 20 rounds of each algorithm, as digests in the repository.

An oracle that is changed together with the code agrees with it; these digests do not. They hold on
any processor and with any supported torch: every operation outside of bagua is exact, or correctly
rounded element by element. So there is neither a matrix product nor a drawn number, and rates,
momenta and 1 - beta are powers of two: a fused multiply-add rounds as two operations do.

A change that is meant to change bits renews them, and its commit says why they changed::

    RENEW_TRAJECTORIES=1 make test ARGS=tests/ranks/test_trajectories.py
"""

import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    SparseAlgorithm,
)
from support import training

GOLDEN = Path(__file__).with_name("trajectories.json")
ROUNDS = 20
RATE = 2.0**-4


def numbers(shape, seed):
    """Multiples of 1/64 in [-1, 1), of a hash of their places."""
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + 1_000_003 * seed
    mixed = (places * 2_654_435_761) % 2**32
    mixed = ((mixed ^ (mixed >> 15)) * 2_246_822_519) % 2**32
    return ((mixed ^ (mixed >> 13)) % 128 - 64).float().reshape(shape) / 64


class Attracted(torch.nn.Module):
    """Gradients are multiples of 1/64 near the distances of the weights from targets, scaled."""

    def __init__(self):
        super().__init__()
        shapes = {"matrix": (24, 40), "vector": (40,), "odd": (3, 3, 7)}
        for seed, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, torch.nn.Parameter(numbers(shape, seed)))

    def forward(self, seed):
        loss = 0
        for number, weight in enumerate(self.parameters()):
            target = numbers(weight.shape, 100 + 10 * seed + number)
            gradient = ((weight.detach() - target) * 64).round() / 64 / 4**number
            loss = loss + (weight * gradient).sum()
        return loss


def algorithms():
    """By the name of the trajectory, a function that makes the algorithm of an optimizer."""
    lone = {"hierarchical": False}
    return {
        "gradient_allreduce": lambda _: GradientAllReduceAlgorithm(),
        "bytegrad": lambda _: ByteGradAlgorithm(**lone),
        "bytegrad int4_block, feedback": lambda _: ByteGradAlgorithm(
            **lone, codec="int4_block", error_feedback=True
        ),
        "bytegrad bit2_block, feedback": lambda _: ByteGradAlgorithm(
            **lone, codec="bit2_block", error_feedback=True
        ),
        "qadam": lambda optimizer: QAdamAlgorithm(optimizer, False),
        "power_sgd": lambda _: PowerSGDAlgorithm(2, min_compression_rate=1.0, warmup_steps=0),
        "sparse": lambda _: SparseAlgorithm(0.1, warmup_steps=0),
        "decentralized": lambda _: DecentralizedAlgorithm(**lone),
        "low_precision_decentralized": lambda _: LowPrecisionDecentralizedAlgorithm(**lone),
        "diloco": lambda _: DiLoCoAlgorithm(interval=2),
        "diloco int4_block": lambda _: DiLoCoAlgorithm(interval=2, codec="int4_block"),
        "diloco overlap": lambda _: DiLoCoAlgorithm(
            interval=4, fragments=lambda name: int(name != "matrix"), overlap_steps=1
        ),
    }


def optimizer_of(name, model):
    if name == "qadam":
        return QAdamOptimizer(model.parameters(), lr=RATE, warmup_steps=1, betas=(0.5, 0.75),
                              eps=2.0**-10)  # fmt: skip
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)


def exact_rate(optimizer, step):
    """Makes QAdam's rate over its bias correction, which is not a power of two, one."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, QAdamOptimizer):
            group["lr"] = RATE * 2 * (1 - 0.5**step)


def give_queries(model):
    """Makes PowerSGD begin with queries of ours, where it would draw normal numbers."""
    named = dict(model.named_parameters())
    residuals = {f"rank{dist.get_rank()}/error/{n}": torch.zeros_like(p) for n, p in named.items()}
    queries = {
        f"query/{name}": numbers((2, weight[0].numel()), 7)
        for name, weight in named.items()
        if weight.dim() > 1
    }
    counters = {"rounds": 1, "ranks": "0 1", "communications": torch.ones(1, dtype=torch.int64)}
    model.bagua_algorithm.load_state_dict(counters | residuals | queries)


@training.with_group
def trajectory(name):
    """A digest of this rank's weights after the rounds; the bytes that it has sent."""
    model = Attracted()
    optimizer = optimizer_of(name, model)
    chosen = algorithms()[name](optimizer)
    model = model.with_bagua([optimizer], chosen)
    if name == "power_sgd":
        give_queries(model)
    steps = ROUNDS * getattr(chosen, "interval", 1) + getattr(chosen, "overlap_steps", 0)
    for step in range(1, steps + 1):
        exact_rate(optimizer, step)
        optimizer.zero_grad()
        model(2 * step + dist.get_rank()).backward()
        optimizer.step()
    bits = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    return hashlib.sha256(bits).hexdigest()[:16], str(model.bagua_stats()["total"]["bytes_sent"])


def trajectories():
    return {name: trajectory(name) for name in algorithms()}


def test_weights_after_20_rounds_are_those_of_the_repository(ranks):
    first, second = ranks(2, trajectories)
    found = {name: " ".join(first[name] + second[name]) for name in first}
    if os.environ.get("RENEW_TRAJECTORIES"):
        GOLDEN.write_text(json.dumps(found, indent=2) + "\n")
    golden = json.loads(GOLDEN.read_text())
    changed = [name for name in golden | found if golden.get(name) != found.get(name)]
    assert not changed, (
        f"{changed}: weights or bytes sent after {ROUNDS} rounds are others, so the arithmetic of "
        f"these algorithms has changed, or what they send: see the first lines of {__file__}"
    )
