"""Ranks that are threads: engines over ThreadCommunicator, every operation, and what goes wrong."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
import torch.distributed as dist
from bagua import _C
from faults.cases import STEPS
from faults.verdict import RankOutcome
from support import training
from support.threads.engine_ranks import Meeting, plan

TIMEOUT = 1.5  # seconds of an engine
PATIENCE = TIMEOUT + 15.0  # until a rank that has not ended counts as hanging
SLOTS = 3
THIRD = 1.0 / 3.0


class FailingStore(dist.Store):
    """A store whose host is gone from some moment on."""

    def __init__(self):
        super().__init__()
        self._store = dist.HashStore()
        self.gone = False

    def _there(self):
        if self.gone:
            raise RuntimeError("connection reset by peer")
        return self._store

    def set(self, key, value):
        self._there().set(key, value)

    def get(self, key):
        return self._there().get(key)

    def check(self, keys):
        return self._there().check(keys)

    def compare_set(self, key, expected, desired):
        return self._there().compare_set(key, expected, desired)


def _counter():
    return torch.zeros((), dtype=torch.int64)


def _memory(*sizes):
    shares = [torch.zeros(size) for size in sizes]
    return _C.RoundMemory([*shares, torch.zeros(1, dtype=torch.int64)], _C.RoundOutcome())


def operation(name, comm, flat):
    """(the op, the tensors that it leaves its result in besides the bucket)."""
    numel, scratch, mean = flat.numel(), _C.Scratch(), _C.ReduceOp.AVG
    if name == "all_reduce":
        return _C.AllReduce(comm, mean), []
    if name == "average_weights":
        result = torch.zeros_like(flat)
        return _C.AverageWeights(result, _counter(), _C.AllReduce(comm, mean)), [result]
    if name == "gossip":
        return _C.Gossip(comm, _counter(), [1] * comm.size, scratch), []
    if name == "compressed_gossip":
        replicas = [torch.zeros(numel) for _ in range(3)]
        codec = _C.make_codec("block_uint8")
        return _C.CompressedGossip(comm, codec, scratch, *replicas, THIRD, THIRD), replicas
    if name == "low_rank":
        columns = numel // 8
        options = {"warm_start": True, "error_feedback": True, "seed": 0}
        memory = _memory(numel, columns * 2)
        matrices = [(0, 8, columns, 2)]
        return _C.LowRank(comm, scratch, numel, matrices, memory=memory, **options), []
    if name == "sparse":
        return _C.Sparse(comm, scratch, numel, 1 + numel // 10, _memory(numel)), []
    return _C.CompressedAllReduce(comm, _C.make_codec(name), scratch, mean), []


class ThreadRank:
    """One rank of a case."""

    def __init__(self, case, rank, meeting, over):
        self.case, self.rank, self.meeting, self.over = case, rank, meeting, over
        self.mine = case.fault != "none" and rank == case.victim
        self.step = -1
        self.outcome = RankOutcome()
        shape = random.Random(f"{case.algorithm} {case.ranks} {case.lanes}")
        self.flats = [torch.zeros(SLOTS * shape.randint(8, 400)) for _ in range(1 + case.lanes)]
        self.results = []
        # An engine counts slots lane by lane.
        order = sorted(range(len(self.flats)), key=lambda i: (i % case.lanes, i))
        self.first_slot = {index: place * SLOTS for place, index in enumerate(order)}
        self.struck_bucket = str(shape.randrange(len(self.flats)))

    def bucket(self, index):
        flat = self.flats[index]

        def ops(comm):
            op, results = operation(self.case.algorithm, comm, flat)
            self.results += results or [flat]
            around = [_C.PythonOp(lambda b, p=p: self.in_bucket(b, p)) for p in ("before", "after")]
            return [around[0], op, around[1]]

        return plan(str(index), flat, SLOTS, ops)

    def in_bucket(self, bucket, place):
        due = self.mine and self.step == self.case.step and place == self.case.place
        if not due or bucket != self.struck_bucket:
            return
        self.outcome.struck = True
        if self.case.fault == "raise":
            raise ZeroDivisionError("of the op")
        time.sleep(self.case.seconds)

    def at(self, place, engine):
        """Between the calls of a step. Returns whether the rank goes on."""
        if not (self.mine and self.step == self.case.step and place == self.case.place):
            return True
        self.outcome.struck = True
        if self.case.fault == "slow":
            time.sleep(self.case.seconds)
        if self.case.fault == "store fails":
            self.meeting.store.gone = True
        if self.case.fault == "hold":
            self.over.wait(PATIENCE)
        if self.case.fault == "leave":
            engine.stop()
        return self.case.fault not in ("hold", "leave")

    def run(self):
        fault = self.case.fault if self.mine else "none"
        engine = self.meeting.engine(
            self.rank,
            [self.bucket(i) for i in range(len(self.flats))],
            timeout=TIMEOUT,
            fingerprint=2 if fault == "other plan" else 1,
            incarnation=2 if fault == "other incarnation" else 1,
        )
        aborter = threading.Timer(self.case.seconds / 4, engine.abort, ["of the user"])
        if fault == "abort":
            self.outcome.struck = True
            aborter.start()
        try:
            self.outcome.done = self.train(engine)
        except _C.BaguaError as error:
            self.outcome.error, self.outcome.text = type(error).__name__, str(error)
        except Exception as error:  # noqa: BLE001 - it is what the verdict is about
            self.outcome.crash = f"raised {type(error).__name__}: {error}"
        aborter.cancel()
        engine.stop()

    def train(self, engine):
        # An abort needs somebody to talk to.
        for step in range(STEPS if self.case.fault != "abort" else 100000):
            self.step = step
            if not self.at("between", engine):
                return False
            engine.begin_round()
            if not self.at("begun", engine):
                return False
            for index, flat in enumerate(self.flats):
                seed = 1000 * self.step + 10 * index + self.rank
                flat.copy_(torch.randn(flat.numel(), generator=torch.Generator().manual_seed(seed)))
                for slot in range(SLOTS):
                    if slot == 1 and not self.at("marking", engine):
                        return False
                    engine.mark_ready(self.first_slot[index] + slot)
            engine.wait()
            if step < STEPS:
                self.outcome.steps[step] = (training.bits(self.results), True)
        return True


def run_one(case):
    """The outcomes of the ranks of a case, and the seconds that it took."""
    begun = time.monotonic()
    meeting = Meeting(case.ranks, case.lanes, hub_timeout=60.0)
    if case.fault == "store fails":
        meeting.store = FailingStore()
    over = threading.Event()
    ranks = [ThreadRank(case, rank, meeting, over) for rank in range(case.ranks)]
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE
    for rank, thread in enumerate(threads):
        if rank != case.victim:
            thread.join(max(0.0, deadline - time.monotonic()))
    over.set()
    threads[case.victim].join(max(1.0, deadline - time.monotonic()))
    for rank, thread in zip(ranks, threads, strict=True):
        rank.outcome.hangs = thread.is_alive()
    return [rank.outcome for rank in ranks], time.monotonic() - begun


def run(cases, at_once=8):
    """Yields (case, outcomes, seconds) of each, as they end."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(run_one, case): case for case in cases}
        for future in as_completed(futures):
            outcomes, seconds = future.result()
            yield futures[future], outcomes, seconds
