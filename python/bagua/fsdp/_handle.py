"""The communication of a sharded model: the user's handle of it, and its rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bagua import _C
from bagua._core.group import environment
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.ledger import Ledger, Page
from bagua._core.state.saved_values import check_state
from bagua._ops.lane import Lane
from bagua._sync.handle import LaneHandle
from bagua.fsdp._mesh import Groups

__all__ = ["Handle", "Options"]


@dataclass(frozen=True)
class Options:
    """Arguments of ``compress``.

    Attributes:
        reduce_scatter: whether gradients are reduced over shards through the codec.
        read_scale: the factor that gradients carry.
    """

    codec: str
    weights: bool
    reduce_scatter: bool
    error_feedback: bool
    read_scale: Callable[[], float]


class Handle(LaneHandle):
    """Compressed communication at work; made by :func:`compress`.

    It works as long as the model, whether the handle is kept or not.
    """

    def __init__(
        self,
        model_name: str,
        options: Options,
        groups: Groups,
        lane: Lane,
        wrap: str,
        numels: Mapping[str, int],
    ) -> None:
        connections = lane.group.connections
        # In this order on every rank, or two would wait for each other.
        both = [groups.shards, groups.replicas]
        members = {group: lane.communicator(group) for group in both if group is not None}
        ledger = Ledger(
            "bagua.fsdp",
            lambda: connections,
            only_same_ranks="residuals are of shards, so load them with the number of ranks that "
            "saved them, or leave them out",
            pages=options.error_feedback,
        )
        super().__init__(model_name, lane, wrap, ledger)
        self._groups = groups
        self._members = members
        self._codec = _C.make_codec(options.codec, str(lane.device))
        self._operations: dict[tuple[Any, ...], _C.BucketOperations] = {}
        outcome = _C.RoundOutcome()
        for module, numel in numels.items():
            flat = torch.empty(numel, device=lane.device)
            ledger.take(Page(flat, [(module, flat)], outcome))
        self._memories = {page.names[0]: page.memory for page in ledger.pages}
        self._rounds = Rounds(self._memories, outcome, options.read_scale)

    @property
    def has_replicas(self) -> bool:
        """Whether gradients are reduced over replicas, too."""
        return self._groups.replicas is not None

    def is_of_replicas(self, group: dist.ProcessGroup | None) -> bool:
        """Whether ``group`` has the ranks that hold the same shards."""
        replicas = self._groups.replicas
        return replicas is not None and dist.get_process_group_ranks(group) == replicas.ranks

    # Calls of the collectives, on autograd's threads and the main thread, one at a time.

    def reduce_scatter(
        self, module: str, flat: torch.Tensor, divisor: float, group: dist.ProcessGroup
    ) -> None:
        """Sum ``flat``, 1-D, over all ranks; its part of this rank has the result / ``divisor``."""
        self._rounds.reduce(module, "shards")
        memory = self._memories.get(module)
        members = self._of(module, group, self._groups.shards)

        def make() -> _C.BucketOp:
            return _C.CompressedReduceScatter(
                members,
                self._codec,
                self._lane.scratch,
                divisor=divisor,
                memory=memory,
                checksum=environment.get_checksum(),
            )

        if memory is not None:
            self._check_numel(module, flat, memory)
        self._run(f"{module}.gradients", flat, (divisor,), make)

    def all_reduce(self, module: str, flat: torch.Tensor, mean: bool) -> None:
        """Replace ``flat``, 1-D, by its mean or sum over all replicas."""
        assert self._groups.replicas is not None
        self._rounds.reduce(module, "replicas")
        members = self._members[self._groups.replicas]
        op = _C.ReduceOp.AVG if mean else _C.ReduceOp.SUM

        def make() -> _C.BucketOp:
            return _C.CompressedAllReduce(
                members,
                self._codec,
                self._lane.scratch,
                op,
                checksum=environment.get_checksum(),
            )

        self._run(f"{module}.replicas", flat, (mean,), make)

    def all_gather(self, module: str, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Fill ``flat``, 1-D, of which this rank's part is there, with the parts of all ranks."""
        members = self._of(module, group, self._groups.shards)

        def make() -> _C.BucketOp:
            return _C.CompressedAllGather(
                members,
                self._codec,
                self._lane.scratch,
                checksum=environment.get_checksum(),
            )

        self._run(f"{module}.weights", flat, (), make)

    @contextmanager
    def outside_the_lane(self, what: str, module: str) -> Iterator[None]:
        """Have failures of torch's own collectives inside explained as those of the lane."""
        self._running.check()
        try:
            yield
        except RuntimeError as error:
            self._running.transport_failed(f"{what} of '{module}': {error}")
            self._running.check()
            raise

    def _run(
        self,
        bucket: str,
        flat: torch.Tensor,
        arguments: tuple[Any, ...],
        make: Callable[[], _C.BucketOp],
    ) -> None:
        key = (bucket, flat.dtype, flat.device, *arguments)
        if key not in self._operations:
            self._operations[key] = self._watched(bucket, flat, make())
        self._running.post(
            self._operations[key],
            flat,
            round=max(1, self._rounds.number),
            grad_scale=self._rounds.grad_scale,
        ).wait()

    def _watched(self, bucket: str, flat: torch.Tensor, op: _C.BucketOp) -> _C.BucketOperations:
        """The operations of a bucket; on CPU they count the rounds that were not finite."""
        description = op.describe()
        if flat.device.type == "cpu":
            rounds = self._non_finite.setdefault(bucket, _C.NonFiniteRounds())
            op = _C.CountNonFinite(op, rounds)
        return _C.BucketOperations(bucket, description, [op])

    def _of(
        self, module: str, group: dist.ProcessGroup, expected: BaguaProcessGroup | None
    ) -> _C.CountingCommunicator:
        """The communicator of ``expected``, which must be the ranks of ``group``."""
        ranks = dist.get_process_group_ranks(group)
        if expected is None or ranks != expected.ranks:
            raise NotImplementedError(
                f"bagua.fsdp: module '{module}' of '{self._name}' communicates over ranks {ranks}, "
                f"but over {expected.ranks if expected else 'none'} when compress() was called; "
                "call it after the last fully_shard"
            )
        return self._members[expected]

    def _check_numel(self, module: str, flat: torch.Tensor, memory: _C.RoundMemory) -> None:
        expected = memory.value(0).numel()
        if flat.numel() != expected:
            raise RuntimeError(
                f"bagua.fsdp: the gradients of '{module}' have {flat.numel()} elements, but its "
                f"residual has {expected}: parameters were frozen, unfrozen or left without a "
                "gradient, which error_feedback=True does not allow. Call "
                "set_reduce_scatter_unused_params(True), where torch has it, and freeze before "
                "compress()"
            )

    def _settle(self) -> None:
        self._rounds.settle()

    def _restore(self, state: Mapping[str, Any]) -> None:
        check_state(state, "bagua.fsdp")
        if bool(state) != bool(self._memories):
            arguments = "without" if state else "with"
            raise ValueError(
                f"bagua.fsdp: the state has {sorted(state)[:3]}, but compress() was called "
                f"{arguments} error_feedback=True"
            )
        super()._restore(state)


class Rounds:
    """Numbers the reductions of gradients by rounds, and ends what is remembered with them.

    In a backward torch reduces the gradients of every module once over its shards, with hybrid
    sharding once over its replicas, or not at all where no parameter of the module has one. So a
    round ends where a module comes again.

    Attributes:
        number: of the round under way; 0 before the first one.
        grad_scale: the factor that the gradients of this round carry.

    Args:
        memories: by name of the module.
        outcome: of all memories.
        read_scale: called as a round begins: the factor of its gradients.
    """

    def __init__(
        self,
        memories: Mapping[str, _C.RoundMemory],
        outcome: _C.RoundOutcome,
        read_scale: Callable[[], float],
    ) -> None:
        self._memories = memories
        self._outcome = outcome
        self._read_scale = read_scale
        self._came: set[tuple[str, str]] = set()  # (module, ranks)
        self.number = 0
        self.grad_scale = 1.0

    def reduce(self, module: str, over: str) -> None:
        """The gradients of ``module`` are about to be reduced over its "shards" or "replicas"."""
        if self.number == 0 or (module, over) in self._came:
            self.settle()
            self.number += 1
            self._came = set()
            self.grad_scale = self._read_scale()
        self._came.add((module, over))

    def settle(self) -> None:
        """Between rounds: memories hold what they are to hold in the next one."""
        if self.number == 0:
            return
        for module in self._memories:
            if (module, "shards") not in self._came:
                self._outcome.leave(self.number)
                self._came.add((module, "shards"))
        for memory in self._memories.values():
            memory.value(0)
