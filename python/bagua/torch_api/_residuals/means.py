"""Means of buckets with residuals, and checks of the arguments that ask for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bagua import _C
from bagua._core.compression.error_state import error_key, load_memory, ranks_text, views_of
from bagua._core.compression.two_residuals import TwoResiduals, Views
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._ops.compressed_all_reduce import CompressedAllReduce
from bagua._ops.contract.lane import Hierarchy
from bagua.torch_api.bucket import BaguaBucket

__all__ = [
    "CompressedMeans",
    "CompressedMomenta",
    "RememberedMeans",
    "check_hierarchy",
    "check_warmup",
    "errors_of",
    "is_wide",
    "residuals_of",
    "warn_of_useless_residuals",
]


def check_hierarchy(owner: str, hierarchical: Hierarchy | None, error_feedback: bool) -> None:
    """Raise ValueError where residuals, which are of whole buckets, meet shares of buckets."""
    if error_feedback and hierarchical == "sharded":
        raise ValueError(
            f'{owner}: error_feedback=True has no form for hierarchical="sharded"; take True or '
            "False"
        )


def check_warmup(warmup_steps: int) -> None:
    """Raise ValueError for a negative number."""
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} must not be negative")


def is_wide(codec: str) -> bool:
    """Whether ``codec`` rounds to 16 bits, each element by itself."""
    return codec in ("fp16", "bf16")


def warn_of_useless_residuals(owner: str, codec: str | None, error_feedback: bool) -> None:
    """Warn of error feedback where little or nothing is lost."""
    if not error_feedback or not (codec is None or is_wide(codec)):
        return
    what = "without a codec: nothing is lost"
    if codec is not None:
        what = f'with codec="{codec}": 8 bytes per parameter for less than a hundredth of a value'
    warnings.warn(
        f"{owner}: error_feedback=True {what}. Leave it out, or take a codec of fewer bits, such "
        'as "int4_block".',
        stacklevel=3,
    )


def errors_of(bucket: BaguaBucket, memory: _C.RoundMemory) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, residual) of every tensor of ``bucket``; none without error feedback."""
    error = memory.value(0)
    yield from views_of(error, bucket.named_views() if error.numel() else [])


def residuals_of(bucket: BaguaBucket) -> TwoResiduals:
    """The residuals of the compressing operation of ``bucket``."""
    for operation in bucket.ops:
        residuals: TwoResiduals | None = getattr(operation, "residuals", None)
        if residuals is not None:
            return residuals
    raise LookupError(f"bucket '{bucket.name}' has no operation with error feedback")


class RememberedMeans:
    """The operations of a plan's buckets that average them and keep residuals.

    Args:
        process_group: of the algorithm.
        hierarchical: exact inside a node, compressed between the nodes' leaders.
    """

    def __init__(self, process_group: BaguaProcessGroup, hierarchical: bool) -> None:
        self._group = process_group
        self._hierarchical = hierarchical
        self._memories: list[tuple[BaguaBucket, _C.RoundMemory]] = []

    def remember(self, bucket: BaguaBucket, memory: _C.RoundMemory) -> None:
        """``memory`` is that of the operation of ``bucket``: its first tensor is the residual."""
        self._memories.append((bucket, memory))

    @property
    def memories(self) -> Sequence[tuple[BaguaBucket, _C.RoundMemory]]:
        """The buckets so far, and the memories of their operations."""
        return self._memories

    def own_views(self, bucket: BaguaBucket) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of further state of this rank."""
        return iter(())

    def own_values(
        self, bucket: BaguaBucket, state: Mapping[str, Any]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(tensor, value) of :meth:`own_views` as a state has them, perhaps under other keys.

        Raises:
            ValueError: something is missing.
        """
        return iter(())

    def state(self) -> dict[str, Any]:
        """Residuals and the ranks that have them, as :meth:`ErrorFeedbackImpl.state_dict`."""
        rank = self._group.connections.rank
        state: dict[str, Any] = {"ranks": ranks_text(self.members())}
        state |= {error_key(rank, name): view.clone() for name, view in self._errors()}
        for bucket, _ in self._memories:
            state |= {key: view.clone() for key, view in self.own_views(bucket)}
        return state

    def restore(self, state: Mapping[str, Any], equal: Views = ()) -> None:
        """Restore :meth:`state`, perhaps the merged ones of other ranks.

        Args:
            state: to restore.
            equal: (key, tensor) of what the state has besides, equal on all ranks.

        Raises:
            ValueError: something is missing, names the entry; nothing has changed then.
        """
        load_memory(
            state,
            equal=equal,
            errors=self._errors(),
            rank=self._group.connections.rank,
            ranks=self.members(),
            others=(
                pair for bucket, _ in self._memories for pair in self.own_values(bucket, state)
            ),
        )

    def inherit(self, before: RememberedMeans, members: int) -> None:
        """Take this rank's residuals of the same parameters from a plan of other ranks.

        A residual e becomes e P' / P, with P ranks that remembered and P' that do now. A rank that
        has joined has zero, so the mean of e stays what it was, but for what was lost with a rank:
        nothing is exchanged, and nothing counts twice.

        Args:
            before: the plan before, whose rounds are over.
            members: how many ranks remembered there.
        """
        now = len(self.members())
        mine = dict(self._errors())
        with torch.no_grad():
            for bucket, memory in before.memories:
                for name, theirs in errors_of(bucket, memory):
                    if (error := mine.get(name)) is not None:
                        error.copy_(theirs).mul_(now / members)
                before.move_further(bucket, mine, now)

    def move_further(
        self, bucket: BaguaBucket, errors: Mapping[str, torch.Tensor], ranks: int
    ) -> None:
        """Add further state of this rank to ``errors``, for a plan of so many ``ranks``."""

    def clear(self) -> None:
        """Zero residuals: nothing has been compressed."""
        own = [pair for bucket, _ in self._memories for pair in self.own_views(bucket)]
        with torch.no_grad():
            for _, view in (*self._errors(), *own):
                view.zero_()

    def members(self) -> list[int]:
        """The ranks that remember: all, or the nodes' leaders."""
        connections = self._group.connections
        if not self._hierarchical:
            return list(range(connections.size))
        return _C.leaders(connections.node_of_ranks())

    def _errors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._group.connections.rank in self.members():
            for bucket, memory in self._memories:
                yield from errors_of(bucket, memory)


class CompressedMeans(RememberedMeans):
    """The means that a codec compresses, twice."""

    def append_to(self, bucket: BaguaBucket, codec: str, outcome: _C.RoundOutcome) -> None:
        """Append the operation that averages ``bucket``.

        ``outcome``: one for all buckets whose residuals change together.
        """
        bucket.append_operation(
            CompressedAllReduce.with_error_feedback(
                bucket, codec, outcome, self._group, hierarchical=self._hierarchical
            )
        )
        self.remember(bucket, residuals_of(bucket).memory)

    def own_views(self, bucket: BaguaBucket) -> Iterator[tuple[str, torch.Tensor]]:
        rank = self._group.connections.rank
        return residuals_of(bucket).server_views(rank, bucket.named_views())

    def own_values(
        self, bucket: BaguaBucket, state: Mapping[str, Any]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return residuals_of(bucket).saved_server(state, bucket.named_views())

    def move_further(
        self, bucket: BaguaBucket, errors: Mapping[str, torch.Tensor], ranks: int
    ) -> None:
        residuals_of(bucket).move_server(errors, bucket.named_views(), ranks)


class CompressedMomenta(CompressedMeans):
    """Compressed means whose residuals change with the steps.

    A mean that no optimizer step has used is lost; what it has lost must not be kept. So the steps
    are one more part of each round, besides the buckets.

    Attributes:
        outcome: of all buckets.
    """

    def __init__(self, process_group: BaguaProcessGroup, hierarchical: bool) -> None:
        super().__init__(process_group, hierarchical)
        self.outcome = _C.RoundOutcome()
        self._steps = _C.RoundMemory([], self.outcome)

    def commit(self) -> None:
        """The optimizer uses the means of the last round."""
        self.outcome.leave(self.outcome.newest)
