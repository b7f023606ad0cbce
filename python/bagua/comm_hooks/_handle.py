"""The user's handle of a registered communication hook."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.group.process_group import BaguaProcessGroup, close_at_exit
from bagua._core.state.ledger import Page
from bagua._core.state.saved_values import check_no_state
from bagua._core.state.statistics import MainThreadTraffic, lane_statistics
from bagua._ops.lane import Lane
from bagua._sync.plan import counted, divided_first
from bagua.comm_hooks._bucket import HookedBucket
from bagua.torch_api.algorithms._error_feedback import ErrorFeedbackImpl
from bagua.torch_api.algorithms.base import AlgorithmImpl

__all__ = ["Handle"]


class Handle:
    """A communication hook at work; made by :func:`register`.

    The hook works as long as its ``DistributedDataParallel``, whether the handle is kept or not.
    """

    def __init__(
        self,
        module_name: str,
        algorithm: AlgorithmImpl,
        lane: Lane,
        named: Sequence[tuple[str, torch.Tensor]],
        grad_scaler: torch.amp.GradScaler | None,
        wrap: str,
    ) -> None:
        self._algorithm = algorithm
        self._lane = lane
        self._named = {name: (p.size(), p.stride(), p.dtype) for name, p in named}
        self._names = {id(parameter): name for name, parameter in named}
        self._pages: dict[str, Page] = {}  # by name of the bucket
        self._rounds_before = 0  # of the training that a loaded state is of
        self._traffic = MainThreadTraffic(self._connections)
        self.non_finite: dict[str, _C.NonFiniteRounds] = {}
        self._running = _C.DynamicLane(
            name=module_name,
            incarnation=self._connections.incarnation(wrap),
            ops=list(lane.communicators.values()),
            control=self._connections.connect(f"{wrap}/control", "cpu"),
            board=self._connections.board(wrap),
        )
        scaled = (
            grad_scaler is not None
            and grad_scaler.is_enabled()
            and algorithm.traits.reads_grad_scale
        )
        owner = weakref.ref(self)

        def operations(bucket: _C.GradientBucket, round: int) -> _C.BucketOperations:
            handle = owner()
            if handle is None:
                raise _C.BaguaError(f"module '{module_name}': its DistributedDataParallel is gone")
            return handle._operations(bucket, round)

        self._hook = _C.DdpHook(
            self._running,
            operations,
            grad_scale=grad_scaler.get_scale if scaled and grad_scaler else None,
            outcome=algorithm.outcome if isinstance(algorithm, ErrorFeedbackImpl) else None,
        )
        close_at_exit(self)

    @property
    def _group(self) -> BaguaProcessGroup:
        return self._lane.group

    @property
    def _connections(self) -> Connections:
        return self._group.connections

    def attach(self, reducer: Any) -> None:
        """Make this the hook of torch's ``Reducer``.

        Raises:
            RuntimeError: it has one.
        """
        self._hook.register(reducer)

    def _operations(self, torchs: _C.GradientBucket, round: int) -> _C.BucketOperations:
        """Called by autograd's thread for a bucket that is new."""
        bucket = HookedBucket(torchs, self._names)
        memory = self._append_operations(bucket, round)
        specs, scale = divided_first(bucket, self._group)
        ops = [spec.make(self._lane, bucket) for spec in specs]
        ops, rounds = counted(bucket, specs, ops, self.non_finite.get(bucket.name))
        if rounds is not None:
            self.non_finite[bucket.name] = rounds
        return _C.BucketOperations(bucket.name, bucket.describe(), ops, scale, memory)

    def _append_operations(self, bucket: HookedBucket, round: int) -> _C.RoundMemory | None:
        algorithm = self._algorithm
        if not isinstance(algorithm, ErrorFeedbackImpl):
            # Algorithms without memory do not look at the wrapped module.
            algorithm.init_operations(cast(Any, None), bucket)
            return None
        warm_up = algorithm.warmup_steps - self._rounds_before  # its last round
        if round > warm_up:
            return self._compressed(algorithm, bucket).memory
        bucket.append_centralized_synchronous_op(average=True, group=self._group)
        self._hook.renew(warm_up + 1)
        return None

    def _compressed(self, algorithm: ErrorFeedbackImpl, bucket: HookedBucket) -> Page:
        """Append the compressing operation; its page has what is known of its parameters.

        Torch makes its buckets anew after the first step, with other parts.
        """
        if bucket.name in self._pages:
            algorithm.ledger.put_aside(self._pages[bucket.name])
        page = bucket.append_operation(algorithm.compression(bucket)).page
        assert page is not None
        algorithm.ledger.take(page)
        self._pages[bucket.name] = page
        return page

    def stats(self) -> dict[str, Any]:
        """Bytes that this rank sent and times it took, since the hook was registered.

        Returns:
            As ``bagua_stats()`` of a wrapped module, without ``hidden_ns``, ``exposed_ns`` and
            ``longest_wait_ns``: torch waits for the buckets, and does not say how long. Buckets are
            named by their index; torch makes them anew after the first step.
        """
        return lane_statistics(self._running, self._lane.by_purpose, self.non_finite, self._traffic)

    def state_dict(self) -> dict[str, Any]:
        """State of the algorithm: call it on every rank, between two steps.

        Returns:
            The same entries as ``module.bagua_algorithm.state_dict()`` after ``with_bagua``, by
            names of ``ddp.module``'s parameters. Empty for algorithms that remember nothing.
        """
        algorithm = self._algorithm
        if not isinstance(algorithm, ErrorFeedbackImpl):
            return {}
        self._hook.settle()
        algorithm.ledger.counters["rounds"] = self._rounds_before + self._hook.round
        return algorithm.ledger.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`: on every rank, between two steps.

        A state that ``with_bagua``'s algorithm has saved fits too. With another number of ranks
        than saved it, give every rank the dicts of all old ranks merged into one (``a | b | ...``).

        Raises:
            ValueError: the state is of another algorithm, model or number of ranks; names the
                entry. Nothing has changed then.
        """
        algorithm = self._algorithm
        if not isinstance(algorithm, ErrorFeedbackImpl):
            check_no_state(state, type(algorithm).__name__)
            return
        # The memory of this page is no member of the rounds to come.
        outcome, algorithm.outcome = algorithm.outcome, _C.RoundOutcome()
        try:
            page = algorithm.compression(self._all_parameters()).page
        finally:
            algorithm.outcome = outcome
        assert page is not None
        algorithm.ledger.restore(state, [page])
        self._rounds_before = algorithm.ledger.counters["rounds"] - self._hook.round
        self._hook.renew(self._hook.round + 1)

    def _all_parameters(self) -> HookedBucket:
        """A bucket of all parameters, without memory."""
        tensors, offsets, numel = [], [], 0
        for size, stride, dtype in self._named.values():
            tensors.append(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
            offsets.append(numel)
            numel += size.numel()
        buffer = torch.empty(numel, dtype=self._widest(), device="meta")
        names = {id(tensor): name for tensor, name in zip(tensors, self._named, strict=True)}
        return HookedBucket(_C.GradientBucket(0, buffer, tensors, offsets), names, "every")

    def _widest(self) -> torch.dtype:
        widest = torch.float16
        for _, _, dtype in self._named.values():
            widest = torch.promote_types(widest, dtype)
        return widest

    def close(self) -> None:
        """End the thread and the connections. A backward after it raises. Idempotent.

        torch cannot take a hook back: construct ``DistributedDataParallel`` again to go on.
        """
        self._running.stop()
