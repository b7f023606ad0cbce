"""Program of the processes of `test_two_nodes.py`: `two_nodes.py <folder> <algorithm> ...`.

Started by torchrun. Trains with the algorithms in turn and leaves `<rank>.json` in the folder: what
was seen, and the bytes that left the node's device next to those that were counted.
"""

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import (
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from torch import nn
from torch.nn import functional

STEPS = 6
RATE = 0.05
DEVICE = Path("/sys/class/net/eth0/statistics")
HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP 20 and its time stamp option 12
SEGMENT_BYTES = 1448  # of payload, at an MTU of 1500


class Expected(NamedTuple):
    """Properties of an algorithm on two nodes.

    ranks_agree: all ranks hold the same weights after a step; agree_after_rest: after a step with
    learning rate 0. astray: the mean of all ranks' weights moves by the mean of what the optimizers
    did, up to this relative error. share: bytes that a leader sends per byte of the model.
    """

    ranks_agree: bool
    agree_after_rest: bool
    astray: float
    share: float


# Name -> what makes it for an optimizer, and what to expect.
ALGORITHMS = {
    "gradient_allreduce": (
        lambda _: GradientAllReduceAlgorithm(hierarchical=True),
        Expected(ranks_agree=True, agree_after_rest=True, astray=1e-3, share=1.0),
    ),
    "bytegrad": (
        lambda _: ByteGradAlgorithm(hierarchical=True),
        Expected(ranks_agree=True, agree_after_rest=True, astray=1e-3, share=0.251),
    ),
    "decentralized": (
        lambda _: DecentralizedAlgorithm(hierarchical=True),
        Expected(ranks_agree=False, agree_after_rest=True, astray=1e-3, share=1.0),
    ),
    "decentralized_shift_one": (
        lambda _: DecentralizedAlgorithm(hierarchical=True, peer_selection_mode="shift_one"),
        Expected(ranks_agree=False, agree_after_rest=True, astray=1e-3, share=1.0),
    ),
    # Its round comes after the step, so leaders' nodes differ at rest, too, by what codes lose.
    "low_precision_decentralized": (
        lambda _: LowPrecisionDecentralizedAlgorithm(hierarchical=True),
        Expected(ranks_agree=False, agree_after_rest=False, astray=0.05, share=0.251),
    ),
    "qadam": (
        lambda optimizer: QAdamAlgorithm(optimizer, hierarchical=True),
        Expected(ranks_agree=True, agree_after_rest=True, astray=float("inf"), share=0.251),
    ),
}


def make_model():
    """1.06 million parameters of 4 bytes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(500, 1000), nn.Tanh(), nn.Linear(1000, 555))


def device_bytes():
    """Payload that has left this node: without packet headers, and without what was sent again."""
    sent, packets = (int((DEVICE / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line
    )
    again = int(values[names.index("RetransSegs")])
    return sent - HEADER_BYTES * packets - SEGMENT_BYTES * again


def read(model):
    """`device_bytes` and statistics while no rank sends anything else."""
    dist.barrier()
    values = device_bytes(), model.bagua_stats()
    dist.barrier()
    return values


def all_equal(tensors):
    """Whether every rank holds the same bits."""
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor.detach())
        if not all(torch.equal(other, gathered[0]) for other in gathered):
            return False
    return True


def mean_over_ranks(tensors):
    total = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
    dist.all_reduce(total)
    return total / dist.get_world_size()


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    inputs = torch.randn(16, 500, generator=generator)
    optimizer.zero_grad()
    functional.mse_loss(model(inputs), torch.randn(16, 555, generator=generator)).backward()
    optimizer.step()


def make_optimizer(name, parameters):
    if name == "qadam":  # one exact step, then compressed ones
        return QAdamOptimizer(parameters, lr=1e-4, warmup_steps=1, eps=1e-3)
    return torch.optim.SGD(parameters, lr=RATE)


def run(name):
    model = make_model()
    optimizer = make_optimizer(name, model.parameters())
    make, _ = ALGORITHMS[name]
    model.with_bagua([optimizer], make(optimizer))
    step(model, optimizer, 0)
    # The mean over all ranks moves by the mean of what the ranks' optimizers did.
    before = mean_over_ranks(model.parameters())
    step(model, optimizer, 1)
    after = mean_over_ranks(model.parameters())
    gradients = mean_over_ranks([p.grad for p in model.parameters()])
    astray = (after - (before - RATE * gradients)).abs().max().item()
    moved = (after - before).abs().max().item()

    sent, stats = read(model)
    for number in range(2, 2 + STEPS):
        step(model, optimizer, number)
    later_sent, later = read(model)
    training = all_equal(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(model, optimizer, 2 + STEPS)
    return {
        "equal": training,
        "equal_after_rest": all_equal(model.parameters()),
        "astray": astray / moved,
        "measured": later_sent - sent,
        "sent": {
            purpose: traffic["bytes_sent"] - stats["communicators"][purpose]["bytes_sent"]
            for purpose, traffic in later["communicators"].items()
        },
        "control": later["control"]["bytes_sent"] - stats["control"]["bytes_sent"],
        "ops": sorted({op for bucket in stats["buckets"] for op in bucket["ops"]}),
    }


def main():
    torch.set_num_threads(1)
    start = time.monotonic()
    bagua.init_process_group()
    result = {
        "init_seconds": time.monotonic() - start,
        "rank": bagua.get_rank(),
        "node": bagua.env.get_node_rank(),
        "local_rank": bagua.get_local_rank(),
        "local_size": bagua.get_local_size(),
        "bytes_of_model": sum(4 * p.numel() for p in make_model().parameters()),
        "algorithms": {},
    }
    dist.barrier()
    folder, *names = sys.argv[1:]
    for name in names:
        result["algorithms"][name] = run(name)
    (Path(folder) / f"{bagua.get_rank()}.json").write_text(json.dumps(result))
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()
