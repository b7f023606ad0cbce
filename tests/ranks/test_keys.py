"""Keys in the job's store after few and after many steps, rounds and calls: as many."""

import functools
import gc
import re
import time

import bagua.torch_api as bagua
import pytest
import torch
import torch.distributed as dist
from bagua import comm_hooks
from bagua.torch_api.algorithms import DiLoCoAlgorithm, Elastic
from bagua.torch_api.checkpoint import load_latest, save_checkpoint
from bagua.torch_api.data_parallel import DistributedDataParallel
from support import every_algorithm, sharded, training


def trains(model, optimizer):
    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    return step


def wrapped(name):
    return trains(*every_algorithm.wrapped(name, torch.nn.Linear(4, 2)))


def in_rounds(elastic=False, **arguments):
    model = torch.nn.Linear(4, 2)
    optimizer = training.sgd(model)
    algorithm = DiLoCoAlgorithm(interval=2, elastic=elastic, **arguments)
    model.with_bagua([optimizer], algorithm)
    step = trains(model, optimizer)

    def count_and_step():
        if arguments:
            model.bagua_samples(1)
        step()

    return count_and_step


def through_a_hook():
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    comm_hooks.register(ddp, "bytegrad")
    return trains(ddp, training.sgd(ddp))


def as_torchs_class():
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    return trains(ddp, training.sgd(ddp))


def sharded_by_torch():
    model, _ = sharded.compressed("block_uint8")
    optimizer = sharded.adam(model)
    return lambda: sharded.train(model, optimizer, 1)


def collectives():
    rank = dist.get_rank()
    pair, alone = torch.ones(2), torch.ones(1)

    def call():
        bagua.allreduce_inplace(pair)
        bagua.broadcast(pair)
        bagua.allgather(alone, pair)
        bagua.alltoall_inplace(pair)
        (bagua.send if rank == 0 else bagua.recv)(pair, 1 - rank)
        bagua.communication.broadcast_object({"rank": rank})
        bagua.barrier()

    return call


def averages():
    model, _ = every_algorithm.wrapped("decentralized-all", torch.nn.Linear(4, 2))
    return lambda: bagua.average_weights(model)


def checkpoints(folder):
    model, optimizer = every_algorithm.wrapped("diloco", torch.nn.Linear(4, 2))
    steps = iter(range(1, 1000))

    def save_and_load():
        save_checkpoint(folder, {"model": model, "optimizer": optimizer}, next(steps), keep=1)
        load_latest(folder, {"model": model, "optimizer": optimizer})

    return save_and_load


def wraps():
    return lambda: wrapped("bytegrad")()


def rewraps():
    model = torch.nn.Linear(4, 2)
    return lambda: trains(*every_algorithm.wrapped("gradient_allreduce", model))()


#: Those that do more between steps than others: a thousand steps, of others two hundred.
BUSY = "gradient_allreduce", "auto", "diloco", "async"
#: By door: what is made on all ranks, and how often what it returns is called at first and then.
DOORS = {
    **{
        name: (functools.partial(wrapped, name), 10, 990 if name in BUSY else 190)
        for name in every_algorithm.ALGORITHMS
    },
    "diloco by samples": (functools.partial(in_rounds, weight="samples"), 20, 180),
    "diloco elastic": (functools.partial(in_rounds, True), 20, 180),
    "diloco with a grace": (
        functools.partial(in_rounds, Elastic(quorum=2, grace=9.0), weight="samples"),
        20,
        180,
    ),
    "comm hook": (through_a_hook, 10, 190),
    "DistributedDataParallel": (as_torchs_class, 10, 190),
    "fsdp": (sharded_by_torch, 10, 40),
    "collectives": (collectives, 10, 90),
    "average_weights": (averages, 10, 90),
    "wraps": (wraps, 3, 9),
    "rewraps": (rewraps, 3, 9),
}


@training.with_group
def counted(folder):
    """By door the keys after few calls, and after many more."""
    store, found = dist.distributed_c10d._get_default_store(), {}
    saves = {"checkpoints": (functools.partial(checkpoints, folder), 10, 40)}
    for name, (make, *times) in (DOORS | saves).items():
        call, keys = make(), []
        for calls in times:
            for _ in range(calls):
                call()
            dist.barrier()
            keys.append(sorted(store.list_keys()))
            dist.barrier()
        found[name] = keys
        del call
        gc.collect()  # what it has made ends here, not in the steps of the next one
        dist.barrier()
    return found


@pytest.mark.timeout(240)
def test_steps_rounds_calls_and_wraps_leave_no_more_keys_when_there_are_many(ranks, tmp_path):
    for found in ranks(2, counted, str(tmp_path), timeout=200.0):
        for name, (few, many) in found.items():
            assert len(many) <= len(few), (name, sorted({*many} - {*few}))


def started():
    """Keys of boards while groups are there, and after some starts over torch's group."""
    store = dist.distributed_c10d._get_default_store()
    of_others = of_boards(store)
    for _ in range(2):
        bagua.init_process_group()
        wrapped("bytegrad")()
        bagua.communication.new_group([0, 1])  # dropped by each rank while the other may be in it
        gc.collect()
        present = of_boards(store) - of_others
        dist.barrier()
        bagua.destroy_process_group()
        dist.barrier()
        deadline = time.monotonic() + 20.0
        while (left := of_boards(store) - of_others) and time.monotonic() < deadline:
            time.sleep(0.05)
        dist.barrier()
    return present, left


def of_boards(store):
    return {key for key in store.list_keys() if re.search(r"/beat/\d+$|/news$", key)}


def test_groups_that_all_ranks_have_left_leave_no_heartbeats(ranks):
    for present, left in ranks(2, started):
        assert present
        assert not left
