"""All-reduce between ranks of one host: in place, through shared memory, over gloo, and a memcpy.

    python benchmarks/bench_shm.py [--quick]

2 and 4 ranks, 1 KiB to 64 MiB of float32, mean. "bucket" is a bucket of exact gradients, in memory
that the ranks share, "shm" any other tensor. They take turns in the same processes; a memcpy runs
on all ranks at once, so that it shares the memory's bandwidth as the all-reduce does. "openmpi" is
MPI_Allreduce in place, of Debian's openmpi where `mpicc` and `mpirun` are installed; it runs in
processes of its own, before and after the others. Prints JSON and keeps it under
build/benchmarks/. `load` is the machine's load average before and after:
figures of a machine that does something else are to be read with it.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from bagua import _C
from common import machine, timed_in_turns, write_results
from rank_processes import figures_of

RANKS = (2, 4)
KIB = (1, 16, 256, 1024, 4096, 16384, 65536)


def repeats(kib, quick):
    return max(7, min(200, 65536 // kib // (8 if quick else 1)))


def times_of_open_mpi(ranks, quick):
    """Seconds by size, or None where it is not installed."""
    compiler, launcher = shutil.which("mpicc"), shutil.which("mpirun")
    if compiler is None or launcher is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "all_reduce"
        source = Path(__file__).with_name("open_mpi_all_reduce.c")
        subprocess.run([compiler, "-O2", "-o", program, source], check=True)
        launch = [launcher, "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), program]
        sizes = [str(word) for kib in KIB for word in (kib, repeats(kib, quick))]
        text = subprocess.run([*launch, *sizes], check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in text.splitlines()]
    return {
        f"{kib} KiB": {"median": float(median), "min": float(least)} for kib, median, least in lines
    }


def add_open_mpi(figures, runs):
    """The mean of the medians of the runs, and the smallest time of all."""
    for size, arms in figures.items():
        medians = [run[size]["median"] for run in runs]
        least = min(run[size]["min"] for run in runs)
        arms["openmpi"] = {"median": statistics.mean(medians), "min": least}


def time_on_rank(arguments):
    """Seconds of each size and arm, on rank 0."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=60)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, rank == 0, limit)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, limit)
    gloo = _C.C10dCommunicator(backend)
    meeting = _C.Gathering(store, "shm", rank, size, limit.total_seconds())
    shm, reason, _ = meeting.share_memory(node=0)
    if shm is None:
        raise SystemExit(f"the ranks share no memory: {reason}")
    figures = {}
    for kib in KIB:
        values = torch.randn(256 * kib)
        copy = torch.empty_like(values)
        bucket = values.clone()
        in_place = _C.AllReduce(shm, _C.ReduceOp.AVG, bucket)

        def memcpy(copy=copy, values=values):
            copy.copy_(values)

        arms = {
            "bucket": lambda op=in_place, flat=bucket: op.run(flat, 1, 1.0, ""),
            "shm": lambda values=values: shm.all_reduce(values, _C.ReduceOp.AVG),
            "gloo": lambda values=values: gloo.all_reduce(values, _C.ReduceOp.AVG),
            "memcpy": memcpy,
        }
        figures[f"{kib} KiB"] = timed_in_turns(arms, repeats(kib, arguments.quick), 2)
    if rank == 0:
        arguments.rank_output.write_text(json.dumps(figures))
    gloo.all_reduce(torch.zeros(1), _C.ReduceOp.SUM)  # no rank leaves before the last call


def ratios(figures, of, by):
    return {size: arms[of]["median"] / arms[by]["median"] for size, arms in figures.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a first impression")
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_output:
        return time_on_rank(arguments)
    options = ["--quick"] if arguments.quick else []
    result = {"machine": machine(), "load": [os.getloadavg()[0]], "seconds": {}, "ratios": {}}
    for ranks in RANKS:
        name = f"{ranks} ranks"
        before = times_of_open_mpi(ranks, arguments.quick)
        figures = figures_of("none", sys.argv[0], options, ranks)
        if before is not None:
            add_open_mpi(figures, [before, times_of_open_mpi(ranks, arguments.quick)])
        result["seconds"][name] = figures
        result["ratios"][name] = {
            f"{arm} to {other}": ratios(figures, arm, other)
            for arm in ("bucket", "shm")
            for other in ("gloo", "memcpy", "openmpi")
            if other in figures[f"{KIB[0]} KiB"]
        }
    result["load"].append(os.getloadavg()[0])
    print(json.dumps(result, indent=2))
    if not arguments.quick:
        write_results("bench_shm", result)
    return None


if __name__ == "__main__":
    main()
