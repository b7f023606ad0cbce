"""Publishes this rank's statistics in the job's store, for ``bagua top``."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.process_group import close_at_exit
from bagua._watch.per_round import moved

#: Key of a rank's statistics in the job's store.
KEY = "bagua/top/{rank}"
#: Times in a publication, in nanoseconds, summed over the modules of the process.
TIMES = ("wire_ns", "encode_ns", "waiting_ns", "exposed_ns")

_PATIENCE = timedelta(seconds=10)  # until the store, which serves the job already, must answer
_END_SECONDS = 1.0  # for which the end of the group waits for the last publication
_log = logging.getLogger("bagua")


def publish(source: Any, every: float) -> None:
    """Publish the statistics of ``source`` from now on, once in ``every`` seconds.

    One thread of the process does it, over a separate connection: the training never waits.
    """
    global _publisher
    if not env.store_address()[0]:
        _log.warning("BAGUA_TOP is set, but the job's store has no address: nothing to see")
        return
    if _publisher is None or _publisher.ended:
        _publisher = Publisher(every)
        close_at_exit(_publisher)
    _publisher.add(source)


class Publisher:
    """A thread that publishes the sums over some sources, every so many seconds.

    It ends with the process group, or when the store no longer answers.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._sources: weakref.WeakSet[Any] = weakref.WeakSet()
        self._end = threading.Event()
        self._number = 0
        # The group may end before the thread does.
        self._place = {"world": env.get_world_size(), "rank": env.get_rank()}
        self._address = env.store_address()
        self._thread = threading.Thread(target=self._run, name="bagua-top", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._end.is_set() or not self._thread.is_alive()

    def add(self, source: Any) -> None:
        self._sources.add(source)

    def close(self) -> None:
        """Publish a last time, and end. Idempotent."""
        self._end.set()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        sockets = _C.OpenedSockets()
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                *self._address, is_master=False, wait_for_workers=False, timeout=_PATIENCE
            )
            sockets.give_up_after(dist.default_pg_timeout.total_seconds())
            ended = False
            while not ended:
                ended = self._end.wait(self._every)
                store.set(KEY.format(**self._place), json.dumps(self.publication(ended)))
        except RuntimeError as error:  # of the store: torch's DistError is one
            _log.info("statistics are no longer published: %s", error)

    def publication(self, ended: bool) -> dict[str, Any]:
        """Counters since the buckets were built, as plain numbers.

        ``number`` counts publications, ``at`` is seconds of a clock of this rank.
        """
        self._number += 1
        sums: dict[str, int] = dict.fromkeys((*TIMES, "bytes_sent", "bytes_received"), 0)
        rounds = 0
        for source in list(self._sources):
            stats = source.stats()
            rounds = max(rounds, stats["rounds"])
            traffic = moved(stats)
            found = {**stats["total"], **stats, **traffic}
            for key in sums:
                sums[key] += found.get(key, 0)
        return {
            **self._place,
            "node": env.get_node_rank(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "number": self._number,
            "at": time.monotonic(),
            "every": self._every,
            "ended": ended,
            "rounds": rounds,
            **sums,
        }


_publisher: Publisher | None = None
