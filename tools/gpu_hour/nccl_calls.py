"""Microseconds of the host in a call of NCCL, and MiB of the GPU that a communicator takes.

    nccl_calls.py torch     torch's own communicators, blocking and not; needs no build
    nccl_calls.py ours      bagua's

In the non-blocking mode, which bagua takes, NCCL makes a thread for each call.
"""

import datetime
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import two_hosts

#: Name -> variables of its ranks.
WAYS = {
    "torch, blocking": {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"},
    "torch, non-blocking": {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"},
    "ours": {},
}
CALLS, AT_ONCE = (20, 5) if two_hosts.DRY else (200, 10)
FOUND = "found: "


def synchronize():
    if not two_hosts.DRY:
        torch.cuda.synchronize()


def micros(call):
    """The median of a call, with few of them on the stream at a time."""
    for _ in range(AT_ONCE):
        call()
    times = []
    for turn in range(CALLS):
        if turn % AT_ONCE == 0:
            synchronize()
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    synchronize()
    return round(statistics.median(times), 1)


def mib_in_use():
    if two_hosts.DRY:
        return 0
    synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def calls_of_torch(small, large, parts, swapped):
    waiting = []

    def later(work):  # the end of a call is not part of it, but of gloo's next one
        waiting.append(work)
        if two_hosts.DRY:
            waiting.pop().wait()

    return {
        "all_reduce 4 KiB": lambda: later(dist.all_reduce(small, async_op=True)),
        "all_reduce 4 MiB": lambda: later(dist.all_reduce(large, async_op=True)),
        "all_to_all": lambda: later(dist.all_to_all_single(swapped, parts, async_op=True)),
    }


def calls_of_ours(small, large, parts, swapped):
    from bagua import _C

    if two_hosts.DRY:
        backend = dist.group.WORLD._get_backend(small.device)
        comm, more = _C.C10dCommunicator(backend), {}
    else:
        store = dist.PrefixStore("calls", dist.distributed_c10d._get_default_store())
        library, rank = _C.NcclLibrary.find([]), dist.get_rank()
        comm = _C.NcclCommunicator(library, store, rank, 2, small.device, 60.0)
        more = {"the flag behind a bucket": lambda: comm.invalidate_if_aborted(small)}
    return {
        "all_reduce 4 KiB": lambda: comm.all_reduce(small, _C.ReduceOp.SUM),
        "all_reduce 4 MiB": lambda: comm.all_reduce(large, _C.ReduceOp.SUM),
        "all_to_all": lambda: comm.all_to_all(parts, swapped),
        **more,
    }


def measure(way):
    """On a rank."""
    device = torch.device("cpu" if two_hosts.DRY else "cuda:0")
    backend = "gloo" if two_hosts.DRY else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    tensors = [torch.ones(numel, device=device) for numel in (1024, 1 << 20, 2048, 2048)]
    before = mib_in_use()
    calls = (calls_of_ours if way == "ours" else calls_of_torch)(*tensors)
    calls["all_reduce 4 KiB"]()
    found = {"MiB of a communicator": mib_in_use() - before}
    found |= {name: micros(call) for name, call in calls.items()}
    print(FOUND + json.dumps(found), flush=True)
    synchronize()
    os._exit(0)


def main():
    ways = [way for way in WAYS if way.startswith(sys.argv[1])]
    rows, failed = {}, False
    for way in ways:
        first, second = two_hosts.run([__file__, "--measure", way], 60, WAYS[way])
        lines = [line for line in first.said.splitlines() if line.startswith(FOUND)]
        if first.status == second.status == 0 and lines:
            rows[way] = json.loads(lines[0].removeprefix(FOUND))
        else:
            failed = True
            print(f"{way}: {first.status}, {second.status}\n{first.said[-2000:]}")
    table = two_hosts.keep("calls", rows)
    names = list(dict.fromkeys(name for row in table.values() for name in row))
    print("microseconds of the host; MiB of a communicator")
    print(f"{'':26}" + "".join(f"{way:>21}" for way in table))
    for name in names:
        print(f"{name:26}" + "".join(f"{row.get(name, '')!s:>21}" for row in table.values()))
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure(sys.argv[2])
    else:
        main()
