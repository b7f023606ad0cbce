"""Base of the algorithms that send a part of the gradient and keep a residual."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bagua import _C
from bagua._core.compression.error_state import error_key, load_memory, ranks_text
from bagua._core.compression.exact_parameters import exact_parameters
from bagua._core.compression.two_residuals import TwoResiduals, Views
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.bagua_tensor import record_of
from bagua._core.state.saved_values import check_state, saved_count
from bagua._ops.compressed_all_reduce import CompressedAllReduce
from bagua._ops.contract.lane import Hierarchy
from bagua.torch_api.algorithms.base import AlgorithmImpl, WrappedModule
from bagua.torch_api.bucket import BaguaBucket

__all__ = [
    "BorrowedMeans",
    "BorrowedMomenta",
    "CompressedMeans",
    "CompressedMomenta",
    "ErrorFeedbackImpl",
    "RememberedMeans",
    "check_hierarchy",
    "check_warmup",
    "errors_of",
    "is_wide",
    "residuals_of",
    "warn_of_useless_residuals",
]


def check_hierarchy(owner: str, hierarchical: Hierarchy, error_feedback: bool) -> None:
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
    for name, view in bucket.named_views() if error.numel() else []:
        yield name, error.as_strided(view.size(), view.stride(), view.storage_offset())


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


class ErrorFeedbackImpl(AlgorithmImpl):
    """Exact rounds first, then one compressing op per bucket, with a residual.

    Parameters that ``exact`` names have buckets of their own, without a residual.

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
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool,
        warmup_steps: int,
        exact: Sequence[str] = (),
    ) -> None:
        super().__init__(process_group)
        check_warmup(warmup_steps)
        self.hierarchical = hierarchical
        self.exact = exact
        self._exact_names: set[str] = set()
        self.warmup_steps = warmup_steps
        self.outcome = _C.RoundOutcome()
        self._rounds = 0  # that were communicated
        self._compressing = False
        self._means = self.make_means()
        self._loaded: dict[str, Any] | None = None  # for buckets that are not made yet

    def append_compression(self, bucket: BaguaBucket) -> _C.RoundMemory:
        """Append the compressing op to ``bucket`` and return its memory."""
        raise NotImplementedError

    def equal_views(
        self, bucket: BaguaBucket, memory: _C.RoundMemory
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, tensor) of the state that is equal on all ranks; writes into them take effect."""
        raise NotImplementedError

    def make_means(self) -> RememberedMeans:
        """The memories of new buckets, without any yet."""
        return RememberedMeans(self.process_group, self.hierarchical)

    def need_reset(self) -> bool:
        return self._compressing != (self._rounds >= self.warmup_steps)

    def init_tensors(self, bagua_ddp: WrappedModule) -> list[torch.Tensor]:
        self._compressing = self._rounds >= self.warmup_steps
        self.outcome = _C.RoundOutcome()
        self._means = self.make_means()
        all_names = bagua_ddp.module.named_parameters(remove_duplicate=False)
        exact = exact_parameters(self.exact, all_names)
        self._exact_names = {name for name, p in bagua_ddp.bagua_build_params() if id(p) in exact}
        return super().init_tensors(bagua_ddp)

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool
    ) -> list[BaguaBucket]:
        if not (self._compressing and self._exact_names):
            return super().tensors_to_buckets(tensors, do_flatten)
        groups = [
            [tensor for tensor in group if self._is_exact(tensor) == exact]
            for group in tensors
            for exact in (False, True)
        ]
        return super().tensors_to_buckets(list(filter(None, groups)), do_flatten)

    def _is_exact(self, tensor: torch.Tensor) -> bool:
        return record_of(tensor).name in self._exact_names

    def init_operations(self, bagua_ddp: WrappedModule, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        if not self._compressing:
            bucket.append_centralized_synchronous_op(average=True, group=self.process_group)
            return
        if self._is_exact(bucket.tensors[0]):
            # All elements are no sparse message: the mean is exact, and takes part in the outcome.
            bucket.append_sparse_op(
                1.0,
                self.outcome,
                hierarchical=self.hierarchical,
                group=self.process_group,
                error_feedback=False,
            )
        else:
            self._means.remember(bucket, self.append_compression(bucket))
        if self._loaded is not None and bucket is bagua_ddp.bagua_buckets[-1]:
            state, self._loaded = self._loaded, None
            self._means.restore(state, self._equal_views())

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
        equal = {key: view.clone() for key, view in self._equal_views()}
        return {"rounds": self._rounds} | equal | self._means.state()

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
            self._means.restore(state, self._equal_views())
        else:  # saved before the first compressed round
            self._means.clear()
            for _, view in self._equal_views():
                view.zero_()
        self._rounds = rounds

    def _equal_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket, memory in self._means.memories:
            yield from self.equal_views(bucket, memory)

    def members(self) -> list[int]:
        """The ranks that remember."""
        return self._means.members()


class BorrowedMeans(RememberedMeans):
    """The means of a plan's buckets whose operations are those of an algorithm for gradients.

    What is averaged are other values: updates, or momenta.

    Args:
        compression: appends the operations. Its outcome is made anew, for these buckets.
    """

    def __init__(self, compression: ErrorFeedbackImpl) -> None:
        super().__init__(compression.process_group, compression.hierarchical)
        self._compression = compression
        compression.outcome = _C.RoundOutcome()

    def append_to(self, bucket: BaguaBucket) -> None:
        """Append the operation that averages ``bucket``."""
        self.remember(bucket, self._compression.append_compression(bucket))

    def state(self) -> dict[str, Any]:
        return super().state() | {key: view.clone() for key, view in self._equal_views()}

    def restore(self, state: Mapping[str, Any], equal: Views = ()) -> None:
        super().restore(state, (*equal, *self._equal_views()))

    def clear(self) -> None:
        super().clear()
        with torch.no_grad():
            for _, view in self._equal_views():
                view.zero_()

    def _equal_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket, memory in self.memories:
            for key, view in self._compression.equal_views(bucket, memory):
                # Outer rounds have a number of communications of their own in a state.
                yield "compressions" if key == "communications" else key, view


class BorrowedMomenta(BorrowedMeans):
    """Means of momenta, which change with the steps as :class:`CompressedMomenta` do."""

    def __init__(self, compression: ErrorFeedbackImpl) -> None:
        super().__init__(compression)
        self._outcome = compression.outcome
        self._steps = _C.RoundMemory([], self._outcome)

    def commit(self) -> None:
        """The optimizer uses the means of the last round."""
        self._outcome.leave(self._outcome.newest)
