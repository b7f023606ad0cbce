"""Base of the algorithms that send a part of the gradient and keep a residual."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bagua import _C
from bagua._core.compression.error_state import error_key, load_memory, ranks_text
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.saved_values import check_state, saved_count
from bagua.torch_api.algorithms.base import AlgorithmImpl, WrappedModule
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["ErrorFeedbackImpl", "check_warmup", "errors_of"]


def check_warmup(warmup_steps: int) -> None:
    """Raise ValueError for a negative number."""
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} must not be negative")


def errors_of(bucket: BaguaBucket, memory: _C.RoundMemory) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, residual) of every tensor of ``bucket``; none without error feedback."""
    error = memory.value(0)
    for name, view in bucket.named_views() if error.numel() else []:
        yield name, error.as_strided(view.size(), view.stride(), view.storage_offset())


class ErrorFeedbackImpl(AlgorithmImpl):
    """Exact rounds first, then one compressing op per bucket, with a residual.

    Subclasses define the op (:meth:`append_compression`) and its state besides residuals
    (:meth:`equal_views`). The first tensor of its memory is the residual, as long as the bucket, or
    empty.

    Attributes:
        outcome: shared by the memories of all buckets: they change only with a whole finite round.
    """

    ranks_agree = True
    remembers_gradients = True
    takes_unfrozen = True
    takes_uneven_inputs = True

    def __init__(
        self, process_group: BaguaProcessGroup, hierarchical: bool, warmup_steps: int
    ) -> None:
        super().__init__(process_group)
        check_warmup(warmup_steps)
        self.hierarchical = hierarchical
        self.warmup_steps = warmup_steps
        self.outcome = _C.RoundOutcome()
        self._rounds = 0  # that were communicated
        self._compressing = False
        self._memories: list[tuple[BaguaBucket, _C.RoundMemory]] = []
        self._loaded: dict[str, Any] | None = None  # for buckets that are not made yet

    def append_compression(self, bucket: BaguaBucket) -> _C.RoundMemory:
        """Append the compressing op to ``bucket`` and return its memory."""
        raise NotImplementedError

    def equal_views(
        self, bucket: BaguaBucket, memory: _C.RoundMemory
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of the state that is equal on all ranks; writes into them take effect."""
        raise NotImplementedError

    def need_reset(self) -> bool:
        return self._compressing != (self._rounds >= self.warmup_steps)

    def init_tensors(self, bagua_ddp: WrappedModule) -> list[torch.Tensor]:
        self._compressing = self._rounds >= self.warmup_steps
        self.outcome = _C.RoundOutcome()
        self._memories = []
        return super().init_tensors(bagua_ddp)

    def init_operations(self, bagua_ddp: WrappedModule, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        if not self._compressing:
            bucket.append_centralized_synchronous_op(average=True, group=self.process_group)
            return
        self._memories.append((bucket, self.append_compression(bucket)))
        if self._loaded is not None and len(self._memories) == len(bagua_ddp.bagua_buckets):
            state, self._loaded = self._loaded, None
            self._load_memories(state)

    def init_post_backward_hook(self, bagua_ddp: WrappedModule) -> Callable[[], None]:
        def finish() -> None:
            bagua_ddp.wait_pending_comm_ops()
            self._rounds += 1

        return finish

    # State for checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Counters and residuals: call it on every rank, between two steps.

        Returns:
            ``rounds``, the communicated ones; ``ranks``, those with residuals (with
            ``hierarchical`` the nodes' leaders); from the end of the warm-up on, for every
            parameter, of its shape and f32 (f64), ``rank<r>/error/<name>``; and further
            state of the algorithm.
        """
        state: dict[str, Any] = {"rounds": self._rounds, "ranks": ranks_text(self.members())}
        state |= {key: view.clone() for key, view in self._equal_views()}
        rank = self.process_group.connections.rank
        return state | {error_key(rank, name): view.clone() for name, view in self._errors()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`: on every rank, after ``with_bagua``.

        With another number of ranks than saved it, give every rank the dicts of all old ranks
        merged into one (``a | b | ...``): each then starts from the mean of their
        residuals.

        Raises:
            ValueError: the state is of another algorithm, model or number of ranks; names the
                entry.
        """
        check_state(state, type(self).__name__)
        rounds = saved_count(state, "rounds", type(self).__name__)
        remembers = rounds >= self.warmup_steps and not set(state) <= {"rounds", "ranks"}
        self._loaded = None
        if not self._compressing:
            self._loaded = dict(state) if remembers else None  # the next forward makes the buckets
        elif remembers:
            self._load_memories(state)
        else:  # saved before the first compressed round: residuals are zero
            for _, view in (*self._equal_views(), *self._errors()):
                view.zero_()
        self._rounds = rounds

    def _load_memories(self, state: dict[str, Any]) -> None:
        load_memory(
            state,
            equal=self._equal_views(),
            errors=self._errors(),
            rank=self.process_group.connections.rank,
            ranks=self.members(),
        )

    def _equal_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket, memory in self._memories:
            yield from self.equal_views(bucket, memory)

    def _errors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, error) of every parameter, where this rank remembers."""
        if self.process_group.connections.rank not in self.members():
            return
        for bucket, memory in self._memories:
            yield from errors_of(bucket, memory)

    def members(self) -> list[int]:
        """The ranks that remember."""
        connections = self.process_group.connections
        if not self.hierarchical:
            return list(range(connections.size))
        return _C.leaders(connections.node_of_ranks())
