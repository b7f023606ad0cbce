"""Compares what CountingCommunicator counts with what really left the network device.

    python benchmarks/check_counters.py [--ranks 2 3 4] [--megabytes 4]

Every rank runs each call of a communicator over gloo in a network namespace of its own (root only)
and reads the device's statistics around it. Prints JSON, one entry per call and rank; the exit code
is 1 if the two differ by more than `TOLERANCE` of the larger one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from network import Network, NetworkUnavailableError, bytes_on_the_device

TOLERANCE = 0.02
# What a rank may send without being counted: the messages that line up the ranks, address lookups.
QUIET_BYTES = 4096
SEGMENT_BYTES = 1448  # TCP payload of a full Ethernet frame with a time stamp
SECONDS_TO_DRAIN = 0.1  # what has been sent may still be on its way to the device


def payload_retransmitted() -> int:
    """Payload bytes that TCP sent again: a fast veth drops packets when a core is busy."""
    header, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line
    )
    return int(values[header.index("RetransSegs")]) * SEGMENT_BYTES


def payload_sent() -> int:
    """Payload bytes that left this namespace's device, each counted once."""
    return bytes_on_the_device() - payload_retransmitted()


def rank_main(megabytes: float) -> None:
    """On a rank: every call once; prints {call: [counted bytes, measured bytes]}."""
    import torch
    import torch.distributed as dist
    from bagua import _C

    dist.init_process_group("gloo")
    inner = _C.C10dCommunicator(dist.group.WORLD._get_backend(torch.device("cpu")))
    comm = _C.CountingCommunicator(inner)
    rank, size = comm.rank, comm.size
    numel = int(megabytes * 1e6 / 4) // size * size
    mine, other = torch.ones(numel), torch.empty(numel)
    gathered = torch.empty(numel * size)
    right, left = (rank + 1) % size, (rank - 1) % size
    calls = {
        "all_reduce": lambda: comm.all_reduce(mine, _C.ReduceOp.AVG),
        "all_gather": lambda: comm.all_gather(mine, gathered),
        "all_to_all": lambda: comm.all_to_all(mine, other),
        "broadcast": lambda: comm.broadcast(mine, 1),
        "exchange": lambda: comm.exchange([(mine, right)], [(other, left)]),
    }

    def line_up() -> int:
        inner.all_reduce(torch.zeros(1), _C.ReduceOp.SUM)
        time.sleep(SECONDS_TO_DRAIN)
        return payload_sent()

    line_up()
    result = {}
    for name, call in calls.items():
        counted, measured = comm.traffic()["bytes_sent"], line_up()
        call()
        result[name] = [comm.traffic()["bytes_sent"] - counted, line_up() - measured]
    dist.destroy_process_group()
    print(json.dumps(result))


def check(ranks: int, megabytes: float) -> list[dict[str, object]]:
    """One entry per call and rank, with "ok"."""
    command = [sys.executable, __file__, "--as-rank", "--megabytes", str(megabytes)]
    with Network(ranks) as network:
        ended = network.run([command] * ranks, timeout=120.0)
    entries: list[dict[str, object]] = []
    for rank, process in enumerate(ended):
        for call, (counted, measured) in json.loads(process.stdout.splitlines()[-1]).items():
            allowed = TOLERANCE * max(counted, measured) + QUIET_BYTES
            entries.append(
                {
                    "call": call,
                    "ranks": ranks,
                    "rank": rank,
                    "counted": counted,
                    "measured": measured,
                    "ok": abs(counted - measured) <= allowed,
                }
            )
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--megabytes", type=float, default=4.0, help="size of the tensors")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        rank_main(arguments.megabytes)
        return 0
    try:
        entries = [e for ranks in arguments.ranks for e in check(ranks, arguments.megabytes)]
    except NetworkUnavailableError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(entries, indent=1))
    return 0 if all(entry["ok"] for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main())
