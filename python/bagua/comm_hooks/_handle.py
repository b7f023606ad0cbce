"""A registered communication hook: the user's handle, and torch's buckets as we see buckets."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from bagua import _C
from bagua._core.group.connections import fingerprint
from bagua._core.state.ledger import Page
from bagua._ops.lane import Lane
from bagua._sync.handle import LaneHandle
from bagua._sync.plan import counted, divided_first
from bagua.torch_api.algorithms._error_feedback import ErrorFeedbackImpl
from bagua.torch_api.algorithms.base import AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["Handle"]


class Handle(LaneHandle):
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
        super().__init__(module_name, lane, wrap, algorithm.ledger)
        self._algorithm = algorithm
        self._named = {name: (p.size(), p.stride(), p.dtype) for name, p in named}
        self._names = {id(parameter): name for name, parameter in named}
        self._pages: dict[str, Page] = {}  # by name of the bucket
        self._rounds_before = 0  # of the training that a loaded state is of
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
        specs, scale = divided_first(bucket, self._lane.group)
        ops = [spec.make(self._lane, bucket) for spec in specs]
        ops, rounds = counted(bucket, specs, ops, self._non_finite.get(bucket.name))
        if rounds is not None:
            self._non_finite[bucket.name] = rounds
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
        bucket.append_centralized_synchronous_op(average=True, group=self._lane.group)
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

    def _settle(self) -> None:
        self._hook.settle()
        if "rounds" in self._ledger.counters:
            self._ledger.counters["rounds"] = self._rounds_before + self._hook.round

    def _restore(self, state: Mapping[str, Any]) -> None:
        algorithm = self._algorithm
        if not isinstance(algorithm, ErrorFeedbackImpl):
            return super()._restore(state)
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


class HookedBucket(BaguaBucket):
    """Gradients of some parameters in memory that belongs to torch.

    Args:
        bucket: as torch hands it over.
        names: of the parameters, by ``id``.
        name: of the bucket; by default its index.
    """

    owns_memory = False

    def __init__(
        self, bucket: _C.GradientBucket, names: Mapping[int, str], name: str | None = None
    ) -> None:
        self._buffer = bucket.buffer
        self._offsets = bucket.offsets
        self.names = [names[id(parameter)] for parameter in bucket.parameters]
        super().__init__(bucket.parameters, name or str(bucket.index), flatten=True)

    def _check(self) -> None:
        """Torch has made the bucket."""

    def _carries_gradients(self) -> bool:
        return True

    def _allocate(self) -> None:
        self.backend_tensor = self._buffer
        self.padding_tensor = None
        # Places only, which count from the start of the buffer wherever that lies in its storage.
        flat = torch.empty(self._buffer.numel(), dtype=self._buffer.dtype, device="meta")
        self._views = [
            flat.as_strided(tensor.size(), _strides(tensor), offset)
            for tensor, offset in zip(self.tensors, self._offsets, strict=True)
        ]

    def named_views(self) -> list[tuple[str, torch.Tensor]]:
        return list(zip(self.names, self._views, strict=True))

    def describe(self) -> str:
        """One line, equal on all ranks."""
        lines = [
            f"{name} at {view.storage_offset()}: {view.size()} {view.stride()}"
            for name, view in self.named_views()
        ]
        last = f" to '{self.names[-1]}'" if len(self.names) > 1 else ""
        return f"{[op.describe() for op in self.ops]} on '{self.names[0]}'{last}, " + (
            f"{len(lines)} parameters {fingerprint(lines):016x}"
        )


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Strides of its gradient in torch's bucket: the parameter's own if it is dense."""
    dense = torch.empty_like(parameter, device="meta").stride()
    if dense == parameter.stride():
        return dense
    return torch.empty(parameter.size(), device="meta").stride()
