"""Result of ``bagua_stats()``, put together from counters of the C++ core."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from bagua import _C
from bagua._core.group.connections import TRAFFIC, MainThreadTraffic, add_traffic

_TIMES = ("encode_ns", "busy_ns", "waiting_ns", "hidden_ns")
# torch waits for the results of a dynamic lane, which does not learn for how long.
_NOT_MEASURED = ("hidden_ns", "exposed_ns", "longest_wait_ns")
#: Counters where there are no buckets.
NOTHING: dict[str, Any] = {
    "buckets": [],
    "control": dict.fromkeys(TRAFFIC, 0),
    "rounds": 0,
    **dict.fromkeys(("busy_ns", "hidden_ns", "exposed_ns", "longest_wait_ns"), 0),
}


def statistics(
    counters: Mapping[str, Any],
    communicators: Iterable[tuple[str, _C.CountingCommunicator]],
    main: MainThreadTraffic,
) -> dict[str, Any]:
    """See ``BaguaModule.bagua_stats``.

    Args:
        counters: of the engine or lane, as the C++ core returns them.
        communicators: (purpose, communicator) of its lanes.
        main: what the main thread has sent.
    """
    numbers = ("bytes", *TRAFFIC, *_TIMES)
    total = {key: sum(bucket[key] for bucket in counters["buckets"]) for key in numbers}
    counts = [bucket["nonfinite_rounds"] for bucket in counters["buckets"]]
    total["nonfinite_rounds"] = None if None in counts else sum(counts)
    by_purpose: dict[str, dict[str, int]] = {}
    for name, communicator in communicators:
        add_traffic(
            by_purpose, re.sub(r"\d+$", "", name), communicator.traffic()
        )  # node0, node1, ...
    for purpose, traffic in main.by_purpose.copy().items():  # the main thread may be adding
        add_traffic(by_purpose, purpose, traffic)
    return {**counters, "total": total, "communicators": by_purpose}


def less_for(rank: int, times: float) -> str:
    """Advice where a rank takes so many times as long as the others."""
    return f"rank {rank} takes {times:.1f} times as long: give it {1 / times:.2f} of the batch"


def lane_statistics(
    lane: _C.DynamicLane,
    communicators: Iterable[tuple[str, _C.CountingCommunicator]],
    main: MainThreadTraffic,
) -> dict[str, Any]:
    """``statistics()`` of a dynamic lane, without what it does not know: how long others wait."""
    stats = statistics(lane.stats(), communicators, main)
    for table in (stats, stats["total"], *stats["buckets"]):
        for key in _NOT_MEASURED:
            table.pop(key, None)
    return stats
