"""Periodic lanes on thread ranks: what their tests share."""

from bagua import _C
from support.threads.thread_ranks import wait_until


def make_lane(comm, weights, interval_s=0.001, timeout_s=20.0, board=None, clock=None):
    weights = weights if isinstance(weights, list) else [weights]
    counting = _C.CountingCommunicator(comm)
    options = {"interval_s": interval_s, "timeout_s": timeout_s, "board": board, "clock": clock}
    return _C.PeriodicLane(counting, weights, name="net", **options)


def averages(lane):
    return lane.stats()["rounds"]


def let_through(lane):
    """Training, which is inside, leaves once the lane is at the gate, and comes back at once."""
    wait_until(lambda: lane.at_gate, "the lane at the gate")
    lane.leave()
    lane.enter()
