"""Periodic lanes on thread ranks: what their tests share."""

import time

from bagua import _C


def make_lane(comm, weights, interval_s=0.001, timeout_s=20.0, board=None):
    weights = weights if isinstance(weights, list) else [weights]
    counting = _C.CountingCommunicator(comm)
    return _C.PeriodicLane(
        counting, weights, name="net", interval_s=interval_s, timeout_s=timeout_s, board=board
    )


def averages(lane):
    return lane.stats()["rounds"]


def wait_until(condition, what, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.0005)
