"""Program of the processes of `test_two_nodes.py`: `two_nodes.py <folder>`, started by torchrun.

Trains and leaves `<rank>.json` in the folder: what was seen, and the bytes that left the node's
device next to those that were counted.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import bagua.torch_api as bagua
import torch
import torch.distributed as dist
from bagua.torch_api.algorithms import ByteGradAlgorithm
from support import training
from torch import nn
from torch.nn import functional

STEPS = 6
DEVICE = Path("/sys/class/net/eth0/statistics")
HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP 20 and its time stamp option 12
SEGMENT_BYTES = 1448  # of payload, at an MTU of 1500


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


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    inputs = torch.randn(16, 500, generator=generator)
    optimizer.zero_grad()
    functional.mse_loss(model(inputs), torch.randn(16, 555, generator=generator)).backward()
    optimizer.step()


def run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(500, 1000), nn.Tanh(), nn.Linear(1000, 555))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.with_bagua([optimizer], ByteGradAlgorithm(hierarchical=True))
    step(model, optimizer, 0)
    sent, stats = read(model)
    for number in range(1, 1 + STEPS):
        step(model, optimizer, number)
    later_sent, later = read(model)
    return {
        "bits": training.bits(model.parameters()),
        "bytes_of_model": sum(4 * p.numel() for p in model.parameters()),
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
        "place": [
            bagua.get_rank(),
            bagua.env.get_node_rank(),
            bagua.get_local_rank(),
            bagua.get_local_size(),
        ],
    }
    dist.barrier()
    result |= run()
    (Path(sys.argv[1]) / f"{bagua.get_rank()}.json").write_text(json.dumps(result))
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()
