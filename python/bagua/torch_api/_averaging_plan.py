"""Buckets of weights that are averaged while training goes on: a periodic lane and its gate."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bagua import _C
from bagua.torch_api import _plan
from bagua.torch_api._bucket_ops import AsynchronousOp
from bagua.torch_api._user_hooks import HookOwner
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.tensor import record_of

__all__ = ["AveragingPlan"]

#: How long a rank whose program ends without abort() goes on averaging with those that still train.
_SECONDS_FOR_OTHERS_TO_END = 30.0


class AveragingPlan:
    """The periodic lane of a module: what a :class:`RunningPlan` is to synchronous algorithms.

    Training is inside the gate from a training forward to the end of the optimizer's step, and
    during a forward without gradients; averages are applied outside only.
    """

    synchronising = False
    communicating = False
    in_backward = False

    def __init__(self, ddp: HookOwner, wrap: str) -> None:
        self._buckets = ddp.bagua_buckets
        self._name = ddp.bagua_module_name
        operations = [_only_operation(bucket) for bucket in self._buckets]
        transport = ddp.process_group.transport
        device_type = self._buckets[0].backend_tensor.device.type
        with transport.meeting(f"connecting module '{self._name}'"):
            transport.agree("their buckets", _plan.describe(self._buckets))
            communicator = transport.connect(f"{wrap}/average", device_type)
        self.communicators = [("average", communicator)]
        rounds = _C.NonFiniteRounds()
        self.lane = _C.PeriodicLane(
            communicator,
            [bucket.backend_tensor for bucket in self._buckets],
            name=self._name,
            interval_s=min(op.sync_interval_ms for op in operations) / 1000,
            timeout_s=transport.timeout.total_seconds(),
            board=transport.board(wrap),
            non_finite=rounds,
        )
        (bucket,) = self.lane.stats()["buckets"]
        self.non_finite = {bucket["name"]: rounds} if device_type == "cpu" else {}
        self._operations = operations
        for op in operations:
            op.lane = self.lane
        self._owner = weakref.ref(ddp)
        names = {name for name, _ in ddp.bagua_floating_buffers()}
        self._buffers = {
            record_of(tensor).name: (bucket, index)
            for bucket in self._buckets
            for index, tensor in enumerate(bucket.tensors)
            if record_of(tensor).name in names
        }
        self._inside_forward = False
        self._ending = False
        self._handles = self._install_hooks(ddp)

    def _install_hooks(self, ddp: HookOwner) -> list[RemovableHandle]:
        this = weakref.ref(self)

        def before_forward(module: torch.nn.Module, _: Any) -> None:
            if (plan := this()) is not None:
                plan._before_forward(torch.is_grad_enabled())

        def after_forward(*_: Any) -> None:
            if (plan := this()) is not None:
                plan._after_forward()

        def before_step(*_: Any) -> None:
            if (plan := this()) is not None:
                plan.lane.enter()

        def after_step(*_: Any) -> None:
            if (plan := this()) is not None:
                plan.lane.leave()

        handles = [
            ddp.module.register_forward_pre_hook(before_forward),
            ddp.module.register_forward_hook(after_forward, always_call=True),
        ]
        for optimizer in ddp.bagua_optimizers:
            handles.append(optimizer.register_step_pre_hook(before_step))
            handles.append(optimizer.register_step_post_hook(after_step))
        return handles

    def _before_forward(self, training: bool) -> None:
        if not training:
            if not self.lane.inside:
                self.lane.enter()
                self._inside_forward = True
            return
        self.lane.check()
        self.lane.enter()
        self._take_back()

    def _after_forward(self) -> None:
        if self._inside_forward:
            self._inside_forward = False
            self.lane.leave()

    def _take_back(self) -> None:
        """Tensors that somebody replaced or pointed elsewhere return to their bucket."""
        ddp = self._owner()
        if ddp is not None and self._buffers:
            for name, buffer in ddp.bagua_floating_buffers():
                bucket, index = self._buffers[name]
                if buffer is not bucket.tensors[index]:
                    bucket.tensors[index] = buffer.ensure_bagua_tensor(name, self._name)  # type: ignore[attr-defined]
        for bucket in self._buckets:
            if not bucket.check_flatten():
                for index in range(len(bucket.tensors)):
                    bucket.copy_in(index)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside it no average is applied."""
        held = self.lane.inside
        self.lane.enter()
        try:
            yield
        finally:
            if not held:
                self.lane.leave()

    # What distributed.py calls on every plan.

    def begin_forward(self, communicates: bool) -> None:
        """Backwards communicate nothing here."""

    def call_after_gradients(self, enabled: bool) -> None:
        """Optimizers that step inside backward are refused."""

    def begin_round(self, grad_scale: float = 1.0, result_scale: float = 1.0) -> bool:
        """Nothing is synchronous here, but training begins; gradients stay where they are.

        In the forward that follows the warm-up the hooks of this plan come too late.
        """
        self._before_forward(training=True)
        return False

    def watch(self, outputs: list[torch.Tensor]) -> None:
        """Backward ends nothing here."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def stats(self) -> dict[str, Any]:
        """The lane's, for :func:`bagua.torch_api._statistics.statistics`."""
        return self.lane.stats()

    def hook_ids(self) -> list[int]:
        """Ids of the hooks, for copies that must not have them."""
        return [handle.id for handle in self._handles]

    def pause(self) -> None:
        """End averaging, together with the other ranks, before another plan takes over."""
        self.lane.pause()

    def announce_end(self) -> None:
        """:meth:`stop` will follow because the program ends well."""
        self._ending = self.lane.running
        self.lane.ask_to_pause()

    def stop(self) -> None:
        """Remove the hooks and end the thread, without asking the other ranks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._ending or self.lane.running:
            warnings.warn(
                f"module '{self._name}': asynchronous averaging was still running when its module "
                "or the program ended. Call model.bagua_algorithm.abort(model) on every rank "
                "first: others that train for long after this rank fail in their next average.",
                stacklevel=2,
            )
            if self._ending:
                with suppress(_C.BaguaError):  # others ended before: nothing is left to end
                    self.lane.pause(_SECONDS_FOR_OTHERS_TO_END)
        self.lane.stop()
        for op in self._operations:
            op.lane = None  # the last reference closes the sockets


def _only_operation(bucket: BaguaBucket) -> AsynchronousOp:
    match bucket.ops:
        case [AsynchronousOp() as op]:
            return op
    raise ValueError(
        f"bucket '{bucket.name}': asynchronous averaging cannot be mixed with other operations"
    )
