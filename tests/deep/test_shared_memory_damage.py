"""A rank that writes anything into its shared memory harms nobody's process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SEEDS = int(os.environ.get("BAGUA_TEST_DAMAGES", "3"))

# Ranks are threads, so that what rank 1 may write is in this process's list of mappings.
SCRIPT = """
import ctypes, random, re, sys, threading, time
sys.path.insert(0, {tests!r})
import torch
from bagua import _C
from support.threads.shared_ranks import share
from support.threads.thread_ranks import run_threads

STATE_BYTES = 12288  # counters, descriptions, channels; what follows is data
choose = random.Random({seed})


def writable():
    ranges = re.findall(r"^(\\w+)-(\\w+) rw-s .*memfd:bagua", open("/proc/self/maps").read(), re.M)
    return [int(begin, 16) for begin, end in ranges if int(end, 16) - int(begin, 16) > 2**20]


def damage(until):
    places = writable()
    assert len(places) == 2, places
    values = [0, 1, 7, 64, 2**20, 2**20 + 1, 2**32, 2**63, 2**64 - 1, 2**64 - 64]
    written = 0
    while time.monotonic() < until:
        at = choose.choice(places) + 8 * choose.randrange(STATE_BYTES // 8)
        old = ctypes.c_uint64.from_address(at).value
        value = choose.choice([*values, old + 1, old - 1, old + 64, choose.getrandbits(64)])
        ctypes.c_uint64.from_address(at).value = value % 2**64
        written += 1
        time.sleep(choose.random() * 0.002)
    return written


def call(comm, number):
    size, other = [3, 3000, 400000][number // 4 % 3], 1 - comm.rank
    calls = [
        lambda: comm.all_reduce(torch.zeros(size), _C.ReduceOp.SUM),
        lambda: comm.all_gather(torch.zeros(size), torch.zeros(2 * size)),
        lambda: comm.broadcast(torch.zeros(size), number % 2),
        lambda: comm.exchange([(torch.zeros(size), other)], [(torch.zeros(size), other)]),
    ]
    calls[number % 4]()


kinds, group, begin = set(), 0, time.monotonic()
while group < 8 or (not kinds and time.monotonic() < begin + 40):  # few calls on a busy machine
    group += 1
    communicators = [communicator for communicator, _ in share(2, 0.3)]
    until = time.monotonic() + 0.25

    def run(rank):
        if rank == 2:
            return damage(until)
        try:
            number = 0
            while time.monotonic() < until + 0.1:
                call(communicators[rank], number)
                number += 1
        except _C.BaguaError as error:
            if time.monotonic() < until + 0.1:  # later ones are of a rank that has stopped
                kinds.add(str(error).split(": ")[-1])
        communicators[rank].abort("over")

    run_threads(3, run)
    communicators.clear()
print(sorted(kinds))
"""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_damaged_counters_end_calls_with_errors_in_time(seed):
    script = SCRIPT.format(tests=str(TESTS), seed=seed)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout) > 10  # damage was noticed
