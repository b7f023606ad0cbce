"""Ranks of `share_memory` that are threads of this process."""

import re
from pathlib import Path

import torch.distributed as dist
from bagua import _C
from support.threads.thread_ranks import errors_of_threads, run_threads


def is_shared(tensor):
    """Whether its memory is that of a file which other processes can map."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in re.match(r"(\w+)-(\w+) ", line).groups())
        if begin <= tensor.data_ptr() < end:
            return "memfd:bagua" in line
    return False


def share(n, timeout=20.0, store=None, nodes=None, refusals=None):
    """(communicator or None, reason) by rank."""
    store = store or dist.HashStore()
    results = [None] * n

    def meet(rank):
        node = nodes[rank] if nodes else 0
        refusal = refusals[rank] if refusals else ""
        meeting = _C.Gathering(store, "offer", rank, n, timeout)
        results[rank] = meeting.share_memory(node, refusal)[:2]

    run_threads(n, meet)
    return results


def run_shared_ranks(n, function, *args, timeout=20.0):
    """Call `function(communicator, *args)` on n ranks over shared memory; the results by rank."""
    communicators = [communicator for communicator, _ in share(n, timeout)]
    results = [None] * n

    def run(rank):
        try:
            results[rank] = function(communicators[rank], *args)
        except BaseException as error:
            communicators[rank].abort(f"{type(error).__name__}: {error}")
            raise

    run_threads(n, run)
    return results


def errors_of_shared_ranks(functions, timeout=5.0):
    """The exception (or None) of each rank; `functions[rank](communicator)` runs on that rank."""
    communicators = [communicator for communicator, _ in share(len(functions), timeout)]
    return errors_of_threads(len(functions), lambda rank: functions[rank](communicators[rank]))
