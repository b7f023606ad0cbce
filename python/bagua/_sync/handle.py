"""``LaneHandle``: a lane of jobs inside a wrapper of torch's, and what users ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagua import _C
from bagua._core.group.connections import Connections, MainThreadTraffic, of_agreements
from bagua._core.group.process_group import close_at_exit
from bagua._core.state.ledger import Ledger
from bagua._core.state.statistics import lane_statistics
from bagua._ops.operations import Lane


class LaneHandle:
    """Communication at work, as long as the wrapper of torch's, whether this is kept or not.

    ``lane`` has all communicators that the operations need; ``ledger`` is their state.
    """

    def __init__(self, name: str, lane: Lane, wrap: str, ledger: Ledger) -> None:
        self._name = name
        self._lane = lane
        self._ledger = ledger
        self._traffic = MainThreadTraffic(self._connections)
        self._running = _C.DynamicLane(
            name=name,
            incarnation=self._connections.incarnation(),
            ops=list(lane.communicators.values()),
            control=self._connections.connect(f"{wrap}/control", "cpu", peers=of_agreements),
            board=self._connections.board(wrap, f"module '{name}'"),
        )
        close_at_exit(self)

    @property
    def _connections(self) -> Connections:
        return self._lane.group.connections

    def stats(self) -> dict[str, Any]:
        """Bytes that this rank sent and times it took, since the communication began.

        Returns:
            As ``bagua_stats()`` of a wrapped module, without ``hidden_ns``, ``exposed_ns`` and
            ``longest_wait_ns``: torch waits for the buckets, and does not say how long. What torch
            sends itself does not count.
        """
        return lane_statistics(self._running, self._lane.by_purpose, self._traffic)

    @property
    def weight(self) -> float:
        """The factor of this rank's gradients in the last round: 1 unless ranks say samples.

        Its mean over the ranks is 1, so the mean of the ranks' losses times it is that of all
        samples.
        """
        return self._running.weight

    def _settle(self) -> None:
        """Called before the ledger is saved: between two steps."""

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._ledger.restore(state)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: call it on every rank, between two steps.

        Returns:
            Residuals and counters; entries of this rank alone have its number in their keys. Empty
            for stateless algorithms.
        """
        self._settle()
        return self._ledger.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`: on every rank, between two steps.

        Raises:
            ValueError: the state is of another algorithm, model or number of ranks; names the
                entry. Nothing has changed then.
        """
        self._restore(state)

    def close(self) -> None:
        """End the thread and the connections. A backward after it raises. Idempotent."""
        self._running.stop()
