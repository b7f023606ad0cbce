"""Engines on thread ranks: what the tests of the engine share."""

import time

import torch
import torch.distributed as dist
from bagua import _C
from support.threads.thread_ranks import run_threads

SECONDS = 10.0  # until a test gives up waiting for something that should come at once


class Meeting:
    """Shared state of the engines of one test: a hub per lane, one for agreements, and a store."""

    def __init__(self, n, lanes=1, hub_timeout=20.0):
        self.size = n
        self.control = _C.ThreadHub(n, hub_timeout)
        self.lanes = [_C.ThreadHub(n, hub_timeout) for _ in range(lanes)]
        self.store = dist.HashStore()

    def connect(self, hub, rank):
        return _C.CountingCommunicator(_C.ThreadCommunicator(hub, rank))

    def engine(
        self, rank, buckets, timeout=20.0, fingerprint=1, incarnation=1, board=True, **options
    ):
        """An engine of this rank. buckets: of `plan` below, dealt out to the lanes in turn."""
        comms = [self.connect(hub, rank) for hub in self.lanes]
        lanes = [[] for _ in comms]
        for i, bucket in enumerate(buckets):
            lanes[i % len(lanes)].append(bucket(comms[i % len(lanes)]))
        return _C.Engine(
            [_C.Lane(own, [comm]) for own, comm in zip(lanes, comms, strict=True)],
            name="Net",
            fingerprint=fingerprint,
            incarnation=incarnation,
            timeout_s=timeout,
            control=self.connect(self.control, rank),
            board=_C.FailureBoard(self.store, rank, self.size) if board else None,
            **options,
        )


def alone(*buckets, lanes=1):
    """The engine of a group of one rank."""
    return Meeting(1, lanes).engine(0, buckets)


def slots_of(name, sizes):
    """Slots of the given sizes, one after the other, named name.0, name.1, ..."""
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        _C.Slot(f"{name}.{i}", offset, [size], [1], _C.Adopt.NONE)
        for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
    ]


def plan(name, flat, slots=2, ops=None, mean=True, part=0):
    """A bucket to be: a function that makes it on a lane's communicator.

    slots: how many equal slots. ops: given the communicator, the list of ops; None: an all-reduce.
    """

    def make(comm):
        op = _C.ReduceOp.AVG if mean else _C.ReduceOp.SUM
        made = [_C.AllReduce(comm, op)] if ops is None else ops(comm)
        own = slots_of(name, [flat.numel() // slots] * slots)
        return _C.Bucket(name, flat, own, made, part=part)

    return make


def calls(function):
    """`ops` of a bucket that only calls function(bucket name)."""
    return lambda comm: [_C.PythonOp(function)]


def mark_all(engine):
    for slot in range(engine.slots):
        engine.mark_ready(slot)


def run_round(engine):
    engine.begin_round()
    mark_all(engine)
    engine.wait()


def endings(n, function, *args):
    """(exception or None, seconds) of `function(rank, *args)` in a thread per rank."""
    results = [None] * n

    def run(rank):
        start = time.monotonic()
        error = None
        try:
            function(rank, *args)
        except Exception as caught:  # noqa: BLE001 - the tests look at it
            error = caught
        results[rank] = (error, time.monotonic() - start)

    run_threads(n, run)
    return results


def ones(numel=8):
    return torch.ones(numel)
