"""Two ranks that share the GPU over NCCL, each of which claims to be a host; the CPU in a dry run.

Programs of theirs write a row into results.json. GPU_HOUR_DEVICE: cuda, or cpu in a dry run.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from support.shared_gpu import hosts_that_share_a_gpu

DRY = os.environ["GPU_HOUR_DEVICE"] == "cpu"
BETWEEN_LOOKS = 0.02


class Ended(NamedTuple):
    status: int | None  # None: it had to be killed
    seconds: float
    said: str


def environments(more):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = [{}, {}] if DRY else hosts_that_share_a_gpu(2)
    launcher = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    launcher |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    launcher |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GROUP_WORLD_SIZE": "2"}
    ranks = [{"RANK": str(rank), "GROUP_RANK": str(rank)} for rank in range(2)]
    return [
        os.environ | launcher | own | host | more for own, host in zip(ranks, hosts, strict=True)
    ]


def run(command, seconds, more=None, stands=None):
    """How `python command` has ended on both ranks.

    more: variables. stands: a rank that does not end by itself; it is killed when the other has.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(2)]
        processes = []
        for file, environment in zip(files, environments(more or {}), strict=True):
            with file.open("w") as said:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, command)],
                        env=environment,
                        stdout=said,
                        stderr=subprocess.STDOUT,
                    )
                )
        ended = [None, None]
        waiting = {0, 1} - {stands}
        while waiting and time.monotonic() - begin < seconds:
            for rank in list(waiting):
                if processes[rank].poll() is not None:
                    ended[rank] = time.monotonic() - begin
                    waiting.discard(rank)
            time.sleep(BETWEEN_LOOKS)
        statuses = [process.poll() for process in processes]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        spent = [round(time.monotonic() - begin if s is None else s, 1) for s in ended]
        said = [file.read_text(errors="replace") for file in files]
    return [Ended(*each) for each in zip(statuses, spent, said, strict=True)]


def keep(program, rows):
    """Adds rows, by what they are of, to those that an earlier call has written."""
    file = Path(os.environ["GPU_HOUR_OUT"], "results.json")
    known = json.loads(file.read_text()) if file.exists() else {}
    known[program] = {**known.get(program, {}), **rows}
    file.write_text(json.dumps(known, indent=1))
    return known[program]
