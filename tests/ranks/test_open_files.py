"""Open files of a rank: the connections that its messages need."""

import functools
import gc
import os
import re
import resource
import signal
from datetime import timedelta

import bagua.torch_api as bagua
import torch.distributed as dist
from bagua._core.group.connections import by_doubling
from ranks.test_shared_memory import script
from support import faults, training
from support.cases import over
from support.every_algorithm import ALGORITHMS, wrapped
from support.processes.sockets import connected

GLOO = {"BAGUA_COMM": "gloo"}
#: Of a transport of gloo's own device without connections: it listens, and polls.
OF_A_TRANSPORT = 4
#: Connections of the board to the store, and what Python opens once.
OF_THE_FIRST_WRAP = 4


def open_files():
    return len(os.listdir("/proc/self/fd"))


def connections():
    """Inodes of this process's TCP connections, but for those to the store.

    Threads open one of these again where the store is late, and other sockets to look up names.
    """
    of_store = int(os.environ["MASTER_PORT"])
    return {inode for inode, ports in connected().items() if of_store not in ports}


@functools.partial(faults.with_bagua_group, timeout=60.0)
def count_open_files():
    """Of each algorithm, how many connections a wrap opens and the steps after it."""
    found = {}
    data = [training.batch(step, dist.get_rank()) for step in range(2)]
    for name in ("auto", "auto", *ALGORITHMS):  # the first opens what the group needs, too
        gc.collect()
        before = connections()
        model, optimizer = wrapped(name, training.network())
        after_wrap = connections()
        training.train(model, optimizer, data)
        found[name] = len(after_wrap - before), len(connections() - after_wrap)
        del model, optimizer
    return found


@over(n=[2, 8])
def test_a_rank_opens_the_connections_that_its_messages_need(ranks, n):
    for found in ranks(n, count_open_files, env=GLOO, timeout=180):
        for name, (wrap, steps) in found.items():
            assert steps == 0, (name, found)
            assert 0 < wrap <= 2 * (n - 1), (name, found)  # of a lane, and of agreements


def wrap_with_few_files():
    """The error of a wrap where a rank may open no more files than it has."""
    bagua.init_process_group(timeout=timedelta(seconds=60))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 1, before[1]))
    try:
        model = training.network()
        return training.error_of(lambda: wrapped("bytegrad", model))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        bagua.destroy_process_group()


def test_a_wrap_says_how_many_open_files_it_takes(ranks):
    for error in ranks(2, wrap_with_few_files, env=GLOO, fresh=True):
        told = re.findall(r"take (\d+) open files .* it has (\d+), and it may have (\d+)", error)
        needed, taken, limit = map(int, told[0])
        assert taken <= limit < needed < taken + 16, error
        assert "Call `ulimit -n 1024` before torchrun" in error
        assert "bagua.wrap, rank " in error


#: Of more ranks than tell each other everything directly: see Note [Records of many ranks].
MANY = 10


def train_among_many(name):
    """Prints what a wrap opens and the steps after it, and the error after rank 4 is killed."""
    rank = int(os.environ["RANK"])
    bagua.init_process_group(timeout=timedelta(seconds=60))
    start = open_files()
    model, optimizer = wrapped(name, training.network())
    after_wrap = open_files()
    data = [training.batch(step, rank) for step in range(3)]
    training.train(model, optimizer, data)
    total = sum(p.double().sum().item() for p in model.parameters())
    print(after_wrap - start, open_files() - after_wrap, total, flush=True)
    if rank == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    print(training.error_of(lambda: training.train(model, optimizer, 100 * data)), flush=True)
    os._exit(0)


def test_many_ranks_train_over_few_connections_and_name_the_one_that_is_lost(run_script):
    for name in ("gradient_allreduce", "bytegrad"):
        source = script(f"train_among_many('{name}')", "test_open_files")
        totals = set()
        for rank, end in enumerate(run_script(MANY, source, env=GLOO, timeout=120)):
            assert end.stdout, end.stderr
            figures, *errors = end.stdout.splitlines()
            wrap, steps, total = map(float, figures.split())
            totals.add(total)
            few = len(by_doubling(rank, MANY)) + OF_A_TRANSPORT
            most = few + OF_THE_FIRST_WRAP + (MANY - 1 if name == "bytegrad" else few)
            assert steps <= 0, (name, figures)
            assert wrap <= most, (name, rank, figures)
            assert rank == 4 or "rank 4" in errors[0], (name, rank, errors, end.stderr)
        assert len(totals) == 1, (name, totals)
