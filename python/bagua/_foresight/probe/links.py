"""The link between the ranks of a communicator, with the transport that uses it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bagua import _C
from bagua._foresight.probe.speeds import wait_for
from bagua._foresight.profile import Link

__all__ = [
    "MANY",
    "latency_and_overhead",
    "link_of",
    "per_message",
    "round_of",
]

#: Messages at once, for the cost of one of them.
MANY = 16
#: Small all-reduces beside arithmetic. Each waits some milliseconds for a core, or not at all.
_TRIPS_BESIDE = 40
_TRIPS = 15
_FIRST_BYTES = 1 << 18
_MOST_BYTES = 1 << 24
_SECONDS = 0.1  # that a transfer is to take: longer than the burst that a shaped link lets through
_TRANSFERS = 3
_BESIDE = 0.3  # seconds for which a core works beside transfers


def link_of(communicator: _C.Communicator, device: torch.device | str = "cpu") -> Link:
    """Measure the link of a rank while all ranks send alike; they all call it, between steps.

    1. Small all-reduces and messages, for latency and overhead.
    2. An all-reduce in the memory of a bucket, and messages around a ring, for the bandwidths.
    3. Small all-reduces beside arithmetic on another thread, for how long they wait for a core.
    4. Arithmetic on this thread beside all-reduces on another, for the cores that they take.

    Ranks agree on sizes and times; the slowest one's count. Takes half a second to a second.

    Raises:
        ValueError: there is only one rank.
    """
    if communicator.size == 1:
        raise ValueError("a link needs two ranks")
    device = torch.device(device)
    probe = _Probe(communicator, device)
    reduced, sent, many = probe.trips()
    latency, overhead = latency_and_overhead(communicator.size, reduced, sent)
    hops = 2 * (communicator.size - 1)
    size = probe.size_of_a_transfer()
    bandwidth = probe.all_reduce_bandwidth(size, overhead + hops * latency)
    messages = probe.message_bandwidth(size, overhead + latency)
    processor = probe.processor(size) if device.type == "cpu" else 0.0
    return Link(
        latency,
        bandwidth,
        min(processor, 1 / bandwidth),
        messages=messages,
        overhead=overhead,
        per_message=per_message(many, sent),
        tree=device.type == "cuda",
        wake=probe.wake(reduced) if device.type == "cpu" else 0.0,
    )


def latency_and_overhead(ranks: int, reduced: float, sent: float) -> tuple[float, float]:
    """Latency, and overhead of a collective beyond it, in seconds.

    Args:
        ranks: at least 2; an all-reduce over a ring has 2 (ranks - 1) messages in a row.
        reduced: seconds of an all-reduce of one number.
        sent: seconds of one small message.
    """
    hops = 2 * (ranks - 1)
    latency = max(0.0, (reduced - sent) / (hops - 1))
    return latency, max(0.0, sent - latency)


def per_message(many: float, sent: float) -> float:
    """Seconds of a message among others, from those of ``MANY`` at once and of one alone."""
    return max(0.0, (many - sent) / (MANY - 1))


@contextmanager
def _arithmetic_beside() -> Iterator[None]:
    """Another thread computes as a training does, in calls that leave the interpreter alone."""
    end, a = threading.Event(), torch.randn(768, 768)

    def compute() -> None:
        while not end.is_set():
            torch.mm(a, a)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def round_of(communicator: _C.Communicator, device: torch.device | str = "cpu") -> float:
    """Seconds of an agreement: an all-gather of a few bytes. All ranks call it."""
    mine = torch.zeros(64, dtype=torch.uint8, device=device)
    everyone = torch.zeros(64 * communicator.size, dtype=torch.uint8, device=device)
    probe = _Probe(communicator, torch.device(device))
    return probe.median(lambda: communicator.all_gather(mine, everyone))


class _Probe:
    def __init__(self, communicator: _C.Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._device = device
        size, rank = communicator.size, communicator.rank
        self._right, self._left = (rank + 1) % size, (rank + size - 1) % size

    def trips(self) -> tuple[float, float, float]:
        """Seconds of an all-reduce of one number, of one message and of many."""
        one = torch.zeros(1, device=self._device)
        reduced = self.median(lambda: self._communicator.all_reduce(one, _C.ReduceOp.SUM))
        sent = self.median(self._exchange(8, 1))
        many = self.median(self._exchange(8, MANY))
        return reduced, sent, many

    def size_of_a_transfer(self) -> int:
        """Bytes that take long enough to be measured."""
        seconds = self.median(self._exchange(_FIRST_BYTES, 1), _TRANSFERS)
        size = _FIRST_BYTES * _SECONDS / seconds
        return int(min(max(size, 2 * _FIRST_BYTES), _MOST_BYTES)) // 64 * 64

    def all_reduce_bandwidth(self, size: int, beyond: float) -> float:
        numel = size // 4
        flat = torch.zeros(numel, device=self._device)
        op = _C.AllReduce(self._communicator, _C.ReduceOp.SUM, flat)
        seconds = self.median(lambda: op.run(flat, 1, 1.0, "probe"), _TRANSFERS)
        ranks = self._communicator.size
        return 2 * size * (ranks - 1) / ranks / max(seconds - beyond, 0.2 * seconds)

    def message_bandwidth(self, size: int, beyond: float) -> float:
        seconds = self.median(self._exchange(size, 1), _TRANSFERS)
        return size / max(seconds - beyond, 0.2 * seconds)

    def processor(self, size: int) -> float:
        """Seconds of a core per byte: what arithmetic on this thread loses beside transfers."""
        alone, _ = self._arithmetic(lambda: 0)
        flat = torch.zeros(size // 4)
        op = _C.AllReduce(self._communicator, _C.ReduceOp.SUM, flat)
        ranks, moved, end = self._communicator.size, [0], threading.Event()

        def transfers() -> None:
            # The ranks stop together: the flag is theirs all.
            flag = torch.zeros(1)
            while True:
                flag.fill_(float(end.is_set()))
                self._communicator.all_reduce(flag, _C.ReduceOp.MAX)
                if flag.item():
                    return
                op.run(flat, 1, 1.0, "probe")
                moved[0] += 2 * size * (ranks - 1) // ranks

        thread = threading.Thread(target=transfers, daemon=True)
        thread.start()
        beside, rate = self._arithmetic(lambda: moved[0])
        end.set()
        thread.join()
        lost = max(0.0, 1 - beside / alone)
        return self._largest(lost / rate if rate > 0 else 0.0)

    def wake(self, reduced: float) -> float:
        """Seconds by which a small all-reduce, which takes ``reduced``, is longer beside others."""
        one = torch.zeros(1)
        with _arithmetic_beside():
            self._communicator.all_reduce(one, _C.ReduceOp.SUM)
            begun = time.perf_counter()
            for _ in range(_TRIPS_BESIDE):
                self._communicator.all_reduce(one, _C.ReduceOp.SUM)
            seconds = (time.perf_counter() - begun) / _TRIPS_BESIDE
        return max(0.0, self._largest(seconds) - reduced)

    def _arithmetic(self, counter: Callable[[], int]) -> tuple[float, float]:
        """Multiplications a second, and what ``counter`` counts in one."""
        a = torch.randn(96, 96)
        done, begun, before = 0, time.perf_counter(), counter()
        while (passed := time.perf_counter() - begun) < _BESIDE:
            for _ in range(8):
                torch.mm(a, a)
            done += 8
        return done / passed, (counter() - before) / passed

    def _exchange(self, size: int, count: int) -> Callable[[], None]:
        """A call that sends ``count`` messages to the right, and receives as many."""
        out = torch.zeros(size, dtype=torch.uint8, device=self._device)
        sends = [(out, self._right)] * count
        receives = [(torch.zeros_like(out), self._left) for _ in range(count)]
        return lambda: self._communicator.exchange(sends, receives)

    def median(self, function: Callable[[], object], times: int = _TRIPS) -> float:
        """Seconds of a call after the first one, of the slowest rank."""
        seconds = []
        for _ in range(1 + times):
            begun = time.perf_counter()
            function()
            wait_for(self._device)
            seconds.append(time.perf_counter() - begun)
        return self._largest(statistics.median(seconds[1:]))

    def _largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        number = torch.tensor([value], dtype=torch.float64, device=self._device)
        self._communicator.all_reduce(number, _C.ReduceOp.MAX)
        return float(number)
