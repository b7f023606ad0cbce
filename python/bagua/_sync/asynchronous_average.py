"""Averaging of a bucket's weights during training, in place of operations."""

from __future__ import annotations

from dataclasses import dataclass

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup

__all__ = ["AsynchronousAverage", "check_asynchronous_mode"]


def check_asynchronous_mode(mode: str) -> None:
    """Raise ValueError, naming ``mode``, unless asynchronous averaging has it."""
    if mode != "all":
        raise ValueError(f"asynchronous averaging has peer_selection_mode 'all' only, not '{mode}'")


@dataclass(eq=False)
class AsynchronousAverage:
    """The mean of all ranks' weights, again and again while they are trained.

    The weights are locked by themselves from a training forward to the end of the optimizer's step;
    the methods are for algorithms that need more. They go to the lane of the wrapped module.
    """

    sync_interval_ms: int
    group: BaguaProcessGroup | None
    lane: _C.PeriodicLane | None = None  # made with the plan

    def _made(self) -> _C.PeriodicLane:
        if self.lane is None:
            raise RuntimeError("the operation's bucket is not part of a wrapped module yet")
        return self.lane

    def describe(self) -> str:
        """One line, equal on all ranks: a part of the plan's fingerprint."""
        return f"asynchronous every {self.sync_interval_ms} ms"

    def lock_weight(self) -> None:
        """No average is applied from now on."""
        self._made().enter()

    def unlock_weight(self) -> None:
        """Averages may be applied."""
        self._made().leave()

    def abort(self) -> None:
        """End averaging: returns once every rank has called it."""
        self._made().pause()

    def reset(self) -> None:
        """Average again. Every rank calls it."""
        self._made().resume()

    def check(self) -> None:
        """Raise the BaguaError that ended averaging, if one did."""
        self._made().check()

    def get_status(self) -> bool:
        """Whether averaging runs."""
        return self._made().running
