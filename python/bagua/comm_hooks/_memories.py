"""Residuals and factors by parameter, whatever bucket a parameter is in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bagua import _C
from bagua._core.compression.error_state import error_key, load_memory, ranks_text
from bagua._core.compression.two_residuals import (
    TwoResiduals,
    add_slices,
    saved_slices,
    without_slices,
)
from bagua._core.state.saved_values import check_state, saved_count
from bagua.comm_hooks._bucket import HookedBucket
from bagua.torch_api._residuals.means import errors_of
from bagua.torch_api.algorithms._error_feedback import ErrorFeedbackImpl

__all__ = ["Memories"]

#: Key of the number of compressed rounds in a state.
_COMMUNICATIONS = "communications"


class Memories:
    """Memory of an algorithm with error feedback.

    Torch makes its buckets anew after the first step. A new bucket takes over what the old ones
    remember of its parameters. Its parts are other ones, so what the mean of this rank's part has
    lost goes to the rank's own residual: all ranks together owe what they did.

    Args:
        algorithm: makes the operations and their memories.
    """

    def __init__(self, algorithm: ErrorFeedbackImpl) -> None:
        self._algorithm = algorithm
        self._live: list[tuple[HookedBucket, _C.RoundMemory]] = []
        # Entries of parameters whose old bucket is gone and whose new one has not come, by key; and
        # how often each of them was communicated, by name.
        self._values: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._loaded: Mapping[str, Any] = {}
        self._awaited: set[str] = set()  # names of parameters to be loaded

    def add(self, bucket: HookedBucket) -> _C.RoundMemory:
        """Append the compressing operation; the result has what is remembered."""
        self._retire(bucket)
        memory = self._algorithm.append_compression(bucket)
        self._live.append((bucket, memory))
        if self._awaited.intersection(bucket.names):
            self._awaited.difference_update(bucket.names)
            self._load(self._loaded, bucket, memory)
            self._loaded = without_slices(self._loaded, bucket.names)  # they may be elsewhere now
            return memory
        with torch.no_grad():
            for key, view in self._views(bucket, memory):
                if key == _COMMUNICATIONS:
                    # A matrix without a factor makes the operation begin anew: 0.
                    counts = [self._counts.pop(name, 0) for name in bucket.names]
                    view.fill_(min(counts))
                elif key in self._values:
                    view.copy_(self._values.pop(key))
        return memory

    def _retire(self, new: HookedBucket) -> None:
        """Keep the values of buckets that ``new`` replaces or takes parameters from."""
        names = set(new.names)
        for bucket, memory in self._live.copy():
            if bucket.name != new.name and names.isdisjoint(bucket.names):
                continue
            values = dict(self._views(bucket, memory))
            residuals = _two_residuals(bucket)
            if residuals is not None and self._remembers:
                errors = dict(errors_of(bucket, memory))
                residuals.move_server(errors, bucket.named_views(), self._ranks)
                for key, _ in residuals.server_views(self._rank, bucket.named_views()):
                    del values[key]
            count = int(values.pop(_COMMUNICATIONS))
            self._values |= values
            self._counts |= dict.fromkeys(bucket.names, count)
            self._live.remove((bucket, memory))

    def _views(
        self, bucket: HookedBucket, memory: _C.RoundMemory
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._algorithm.equal_views(bucket, memory)
        if not self._remembers:
            return
        for name, view in errors_of(bucket, memory):
            yield error_key(self._rank, name), view
        if (residuals := _two_residuals(bucket)) is not None:
            yield from residuals.server_views(self._rank, bucket.named_views())

    @property
    def _rank(self) -> int:
        return self._algorithm.process_group.connections.rank

    @property
    def _ranks(self) -> int:
        return len(self._algorithm.members())

    @property
    def _remembers(self) -> bool:
        return self._rank in self._algorithm.members()

    def _load(self, state: Mapping[str, Any], bucket: HookedBucket, memory: _C.RoundMemory) -> None:
        load_memory(
            state,
            equal=self._algorithm.equal_views(bucket, memory),
            errors=errors_of(bucket, memory) if self._remembers else (),
            rank=self._rank,
            ranks=self._algorithm.members(),
        )
        residuals = _two_residuals(bucket)
        if residuals is not None and self._remembers:
            self._load_server(state, bucket, residuals)

    def _load_server(
        self, state: Mapping[str, Any], bucket: HookedBucket, residuals: TwoResiduals
    ) -> None:
        """Load what the mean of this rank's part had lost.

        Where the rank has the parts that it has saved it goes there, and training goes on bit by
        bit. Otherwise it goes to the rank's residual; from other ranks all of it to each.
        """
        own = state["ranks"] == ranks_text(self._algorithm.members())
        slices = saved_slices(state, self._rank if own else None)
        if own and residuals.take_server(slices, bucket.named_views()):
            return
        for name, error in errors_of(bucket, residuals.memory):
            add_slices(name, error, slices.get(name, []), self._ranks if own else 1)

    def state_dict(self, rounds: int) -> dict[str, Any]:
        """The state between two steps, in the format of ``with_bagua``'s algorithms."""
        state: dict[str, Any] = {
            "rounds": rounds,
            "ranks": ranks_text(self._algorithm.members()),
        }
        if self._awaited:
            state |= {key: value for key, value in self._loaded.items() if key not in state}
        state |= self._values
        for bucket, memory in self._live:
            state |= {key: view.clone() for key, view in self._views(bucket, memory)}
        return state

    def load_state_dict(self, state: Mapping[str, Any], every: HookedBucket) -> int:
        """Check a state and keep it for the buckets to come; returns its number of rounds.

        Args:
            every: a bucket of all parameters, on the meta device.

        Raises:
            ValueError: the state is of another algorithm, model or number of ranks; names the
                entry.
        """
        check_state(state, type(self._algorithm).__name__)
        rounds = saved_count(state, "rounds", type(self._algorithm).__name__)
        remembers = rounds >= self._algorithm.warmup_steps and not set(state) <= {"rounds", "ranks"}
        if remembers:
            # Its memory is no member of the rounds to come.
            outcome, self._algorithm.outcome = self._algorithm.outcome, _C.RoundOutcome()
            try:
                self._load(state, every, self._algorithm.append_compression(every))
            finally:
                self._algorithm.outcome = outcome
        self._live, self._values, self._counts = [], {}, {}
        self._loaded = {key: value for key, value in state.items()} if remembers else {}
        self._awaited = set(every.names) if remembers else set()
        return rounds


def _two_residuals(bucket: HookedBucket) -> TwoResiduals | None:
    """The residuals of a mean that is compressed twice; None: of other operations."""
    residuals: TwoResiduals | None = getattr(bucket.ops[-1], "residuals", None)
    return residuals
