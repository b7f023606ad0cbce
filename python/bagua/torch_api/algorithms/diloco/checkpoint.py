"""Checkpoints of local training."""

from __future__ import annotations

from typing import Any

from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.saved_values import saved_count, saved_tensor
from bagua._sync.outer.outer_synchronizer import OuterSynchronizer
from bagua._sync.outer.schedule import Schedule
from bagua.torch_api._residuals.means import RememberedMeans

__all__ = ["OuterCheckpoint"]

_REMEDY = "the checkpoint is of another model or algorithm, or of other overlap_steps"
_ERROR_RANKS = "error_ranks"


class OuterCheckpoint:
    """The state of a plan of local training, by name of the parameter.

    Args:
        owner: the algorithm's name in errors.
        process_group: of the algorithm.
        schedule: of the rounds.
        outer: the plan.
        means: residuals of the plan's operations; None: no error feedback.
    """

    def __init__(
        self,
        owner: str,
        process_group: BaguaProcessGroup,
        schedule: Schedule,
        outer: OuterSynchronizer,
        means: RememberedMeans | None,
    ) -> None:
        self._owner = owner
        self._size = process_group.size
        self._rank = process_group.connections.rank
        self._schedule = schedule
        self._outer = outer
        self._means = means

    def state(self) -> dict[str, Any]:
        """All that :meth:`restore` takes. Waits for a round under way."""
        outer = self._outer
        state: dict[str, Any] = {**outer.counters, "ranks": self._size}
        state |= {key: view.clone() for key, view in outer.named_state()}
        state |= {self._own(key): view.clone() for key, view in outer.named_own_state()}
        if self._means is not None:
            residuals = self._means.state()
            state |= {_ERROR_RANKS: residuals.pop("ranks"), **residuals}
        digest = outer.digest()
        return state if digest is None else state | {self._own("weights"): digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`, perhaps the merged ones of all ranks.

        Raises:
            ValueError: something does not fit, names the entry; nothing has changed then.
        """
        outer, owner = self._outer, self._owner
        counters = {key: saved_count(state, key, owner) for key in outer.counters}
        self._check(counters)
        saved = [
            (view, saved_tensor(state, key, view, _REMEDY)) for key, view in outer.named_state()
        ]
        digest = None
        if saved_count(state, "ranks", owner) == self._size:
            if self._own("weights") in state:
                digest = saved_count(state, self._own("weights"), owner)
            saved += [
                (view, saved_tensor(state, self._own(key), view, _REMEDY))
                for key, view in outer.named_own_state()
            ]
        if self._means is not None:
            if _ERROR_RANKS in state:
                self._means.restore(state | {"ranks": state[_ERROR_RANKS]})
            else:  # saved in the warm-up, or without error feedback
                self._means.clear()
        for view, value in saved:
            view.copy_(value)
        outer.resume_at(counters, digest)

    def _check(self, counters: dict[str, int]) -> None:
        if counters["steps"] >= self._schedule.interval:
            raise ValueError(
                f"{self._owner}: saved after {counters['steps']} steps of an interval, which has "
                f"only {self._schedule.interval} now. Give the interval that it was saved with, or "
                "save after sync()."
            )
        if counters["in_flight"] > self._schedule.fragments:
            raise ValueError(
                f"{self._owner}: saved with fragment {counters['in_flight']} in flight, there are "
                f"only {self._schedule.fragments} now. Give the fragments that it was saved with."
            )

    def _own(self, key: str) -> str:
        return f"rank{self._rank}/{key}"
