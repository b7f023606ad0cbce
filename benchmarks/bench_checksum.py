"""Cost of `BAGUA_CHECKSUM=1`: the sum alone, and an 8-bit all-reduce with and without it.

    python benchmarks/bench_checksum.py [--quick]

The sum is compared with a memcpy of the same bytes, in cache (1 MiB, a message) and out of it. The
all-reduce runs between two ranks that are threads of this process and hand each other memory: there
is no wire, so that its share of a step over any network is smaller. Prints JSON and keeps it under
build/benchmarks/.
"""

import argparse
import ctypes
import json
import threading

import torch
from bagua import _C
from common import machine, timed, timed_in_turns, write_results

SIZES_MIB = (1, 64)
NUMEL = 2**24


def gigabytes_per_second(mib, repeats):
    payload = torch.randint(0, 256, (mib * 2**20,), dtype=torch.uint8)
    copy = torch.empty_like(payload)
    size = payload.numel()

    def memcpy():
        ctypes.memmove(copy.data_ptr(), payload.data_ptr(), size)

    # Alone and many times: a turn of the other would empty the cache.
    arms = {"checksum": lambda: _C.payload_checksum(payload), "memcpy": memcpy}
    return {name: size / timed(arm, repeats, 3)["min"] / 1e9 for name, arm in arms.items()}


def all_reduce_seconds(repeats):
    """Seconds of both arms in turns, on rank 0; rank 1 makes the same calls."""
    hub = _C.ThreadHub(2, 60.0)
    seconds = {}

    def run(rank):
        comm = _C.ThreadCommunicator(hub, rank)
        codec, scratch, flat = _C.make_codec("block_uint8"), _C.Scratch(), torch.randn(NUMEL)
        arms = {}
        for name, checksum in (("without", False), ("with", True)):
            op = _C.CompressedAllReduce(comm, codec, scratch, _C.ReduceOp.AVG, checksum=checksum)
            arms[name] = lambda op=op: op.run(flat)
        seconds[rank] = timed_in_turns(arms, repeats, 2)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a first impression")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    speed = {f"{mib} MiB": gigabytes_per_second(mib, 20 if quick else 200) for mib in SIZES_MIB}
    seconds = all_reduce_seconds(3 if quick else 25)
    result = {
        "machine": machine(),
        "gigabytes_per_second": speed,
        "speed_over_memcpy": {k: v["checksum"] / v["memcpy"] for k, v in speed.items()},
        "all_reduce": {"numel": NUMEL, "ranks": 2, "codec": "block_uint8", "seconds": seconds},
        "all_reduce_ratio_of_minima": seconds["with"]["min"] / seconds["without"]["min"],
        "all_reduce_ratio_of_medians": seconds["with"]["median"] / seconds["without"]["median"],
    }
    print(json.dumps(result, indent=2))
    if not quick:
        write_results("bench_checksum", result)


if __name__ == "__main__":
    main()
