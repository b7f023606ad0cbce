"""How a process of an elastic job begins: with all the others, or after them."""

from __future__ import annotations

import time
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua._core.group.elastic.membership import newest_generation
from bagua._core.group.elastic.pulse import Pulse

__all__ = ["BACKEND", "announce", "elastic_store", "job_at_work", "register_backend"]

#: Name of torch's backend in an elastic job.
BACKEND = "bagua_elastic"

_KEY = "bagua/elastic"  # the incarnation that began last
_PAUSE = 0.1  # seconds between two looks at heartbeats

# Collectives of torch's group, by the names that torch.distributed calls.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "allgather_coalesced"),
    *("gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base"),
    *("reduce_scatter_tensor_coalesced", "send", "recv", "recv_anysource"),
)


def announce(store: c10d.Store, incarnation: str) -> None:
    """The job's store tells processes that come later which start of the job is at work."""
    store.set(_KEY, incarnation)


def elastic_store(group_store: c10d.Store) -> c10d.Store:
    """Keys of the generations of a group."""
    return c10d.PrefixStore("elastic", group_store)


def job_at_work(store: c10d.Store, group: str) -> str | None:
    """The incarnation whose ranks train, one of which this process was; None: all begin.

    Takes some seconds where there was one and its processes are dead. ``group``: its elastic group.
    """
    if not store.check([_KEY]):
        return None
    incarnation = str(store.get(_KEY).decode())
    its_store = elastic_store(c10d.PrefixStore(f"bagua/{incarnation}/{group}", store))
    _, lives = newest_generation(its_store)
    pulse = Pulse(its_store)
    while not all([pulse.silent(life) for life in lives.values()]):
        if any(pulse.beats(life) for life in lives.values()):
            return incarnation
        time.sleep(_PAUSE)
    return None


def register_backend() -> None:
    """Make :data:`BACKEND` known to torch.distributed. Idempotent."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND,
            lambda store, rank, size, timeout: _NoTransport(rank, size),  # type: ignore[call-arg]
            devices=["cpu", "cuda"],
        )


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "torch.distributed's collectives do not work in an elastic job: its groups cannot lose "
        "members, nor be joined. bagua.get_rank() and bagua.get_world_size() do; so do bagua's own "
        "collectives, among the ranks of the moment."
    )


class _NoTransport(dist.ProcessGroup):
    """torch's default group of an elastic job: a rank and a world size."""

    def getBackendName(self) -> str:
        return BACKEND


for _name in _COLLECTIVES:
    setattr(_NoTransport, _name, _refuse)
