"""Buckets of weights that are averaged during training: a periodic lane and its gate."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from bagua import _C
from bagua._core.group.connections import on_ring
from bagua._core.group.process_group import BaguaProcessGroup, close_at_exit
from bagua._core.group.warn import warn
from bagua._core.state.bagua_tensor import record_of
from bagua._core.state.untrained import share_untrained
from bagua._sync.engine import describe
from bagua._sync.hooks import WeakHook, tensors_in
from bagua._sync.optimizer_steps import StepHook, only_makes_state
from bagua._sync.synchronizer import Synchronizer

if TYPE_CHECKING:
    from bagua.torch_api._session import Session
    from bagua.torch_api.bucket import BaguaBucket

#: Time for which a rank that ends without abort() continues averaging with ranks that train.
_SECONDS_FOR_OTHERS_TO_END = 30.0


def check_asynchronous_mode(mode: str) -> None:
    if mode != "all":
        raise ValueError(f"asynchronous averaging has peer_selection_mode 'all' only, not '{mode}'")


@dataclass(eq=False)
class AsynchronousAverage:
    """The mean of all ranks' weights, again and again while they are trained.

    The weights are locked by themselves from a training forward to the end of the optimizer's step;
    the methods are for algorithms that need more. They go to the lane of the wrapped module.
    """

    sync_interval_ms: int
    group: BaguaProcessGroup | None
    plan: AveragingSynchronizer | None = None  # of the wrapped module

    def _made(self) -> AveragingSynchronizer:
        if self.plan is None:
            raise RuntimeError("the operation's bucket is not part of a wrapped module yet")
        return self.plan

    def describe(self) -> str:
        return f"asynchronous every {self.sync_interval_ms} ms"

    def lock_weight(self) -> None:
        """No average is applied from now on."""
        self._made().enter()

    def unlock_weight(self) -> None:
        """Averages may be applied."""
        self._made().leave()

    def abort(self) -> None:
        """End averaging: returns once every rank has called it."""
        self._made().check_plan()
        self._made().end_together()

    def reset(self) -> None:
        """Average again. Every rank calls it."""
        self._made().lane.resume()

    def check(self) -> None:
        """Raise the BaguaError that ended averaging, if one did."""
        self._made().lane.check()

    def get_status(self) -> bool:
        """Whether averaging runs."""
        return self._made().lane.running


class AveragingSynchronizer(Synchronizer):
    """The periodic lane of a wrapped module.

    Training is inside the gate from a training forward to the end of the optimizer's step, and
    during a forward without gradients; averages are applied outside only. Where no optimizer was
    given, nobody tells the end of a step: it has ended when the forward after a backward begins.
    """

    def __init__(self, ddp: Session) -> None:
        super().__init__()
        self._buckets = ddp.bagua_buckets
        self._name = ddp.bagua_module_name
        operations = [_only_operation(bucket) for bucket in self._buckets]
        connections = ddp.process_group.connections
        wrap = connections.next_wrap()
        device = self._buckets[0].backend_tensor.device
        with connections.collective_phase(f"connecting module '{self._name}'"):
            connections.agree("their buckets", describe(self._buckets))
            communicator = connections.connect(f"{wrap}/average", device, peers=on_ring)
        self.communicators = [("average", communicator)]
        self.lane = _C.PeriodicLane(
            communicator,
            [bucket.backend_tensor for bucket in self._buckets],
            name=self._name,
            interval_s=min(op.sync_interval_ms for op in operations) / 1000,
            timeout_s=connections.timeout.total_seconds(),
            board=connections.board(wrap, f"module '{self._name}'"),
        )
        self._operations = operations
        for op in operations:
            op.plan = self
        self._apart = _ShardsApart(self._buckets)
        self._owner = weakref.ref(ddp)
        self._connections = connections
        names = ddp.bagua_mean_buffers()
        self._buffers = [
            (ddp.module.get_submodule(path)._buffers, key, bucket, index)
            for bucket in self._buckets
            for index, tensor in enumerate(bucket.tensors)
            if (name := record_of(tensor).name) in names
            for path, _, key in [name.rpartition(".")]
        ]
        self._replaced_outside = False
        self._inside_forward = False
        self._stays_inside = False  # after a step that only makes state
        self._steps_are_seen = bool(ddp.bagua_optimizers)
        self._step_ended = False
        self._ending = False
        self._handles = self._install_hooks(ddp)
        close_at_exit(self)

    def _install_hooks(self, ddp: Session) -> list[RemovableHandle]:
        this = weakref.ref(self)

        def after_forward(_: torch.nn.Module, __: Any, output: Any) -> None:
            if (plan := this()) is not None:
                plan._after_forward(output)

        handles = [
            # Before FSDP2 gathers shards, where buckets have copies of them.
            ddp.module.register_forward_pre_hook(
                WeakHook(self._before_any_forward),
                prepend=not all(bucket.flatten for bucket in self._buckets),
            ),
            ddp.module.register_forward_hook(after_forward, always_call=True),
        ]
        for optimizer in ddp.bagua_optimizers:
            handles.append(optimizer.register_step_pre_hook(StepHook(self._begin_step)))
            handles.append(optimizer.register_step_post_hook(StepHook(self._end_step)))
        return handles

    def _begin_step(self) -> None:
        self._stays_inside = self.lane.inside and only_makes_state()
        self.enter()

    def _end_step(self) -> None:
        if self._replaced_outside:
            self._step_ended = not self._stays_inside  # the next forward leaves
        elif not self._stays_inside:
            self.leave()

    def _before_any_forward(self) -> None:
        self._before_forward(torch.is_grad_enabled())

    def _before_forward(self, training: bool) -> None:
        if self._step_ended:
            self._step_ended = False
            self.leave()
        if not training:
            if not self.lane.inside:
                self.enter()
                self._inside_forward = True
            return
        self.lane.check()
        self.enter()

    def _after_forward(self, output: Any) -> None:
        if self._inside_forward:
            self._inside_forward = False
            self.leave()
        elif not self._steps_are_seen:
            this = weakref.ref(self)

            def note_backward(_: torch.Tensor) -> None:
                if (plan := this()) is not None:
                    plan._step_ended = True

            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(note_backward)

    def _take_back(self, *, outside: bool) -> None:
        """Return tensors whose memory was replaced to their bucket.

        ``outside``: it was replaced after a step, when averages may go to the old memory. One may
        be lost so; from then on training stays inside the gate until the next forward.
        """
        for owner, key, bucket, index in self._buffers:
            buffer, known = owner.get(key), bucket.tensors[index]
            if buffer is not None and buffer is not known:
                buffer.ensure_bagua_tensor(record_of(known).name, self._name)  # type: ignore[attr-defined]
                bucket.tensors[index] = buffer
        for bucket in self._buckets:
            if bucket.flatten and not bucket.check_flatten():
                self._replaced_outside = self._replaced_outside or outside
                for index in range(len(bucket.tensors)):
                    bucket.copy_in(index)

    def enter(self) -> None:
        """Training begins to use the weights: no average is applied from now on."""
        if not self.lane.inside:
            self.lane.enter()
            self._take_averages()

    def leave(self) -> None:
        """Averages may be applied."""
        if self.lane.inside:
            try:
                self._take_back(outside=False)
                self._apart.give_weights()
            finally:
                self.lane.leave()

    def _leave_at_the_end(self) -> None:
        """:meth:`leave`, but a weight of another shape than at the wrap is left unchanged."""
        with suppress(_C.BaguaError):
            self.leave()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        held = self.lane.inside
        self.enter()
        try:
            yield
        finally:
            if not held:
                self.leave()

    def step_begins(
        self, grad_scale: float = 1.0, result_scale: float = 1.0, samples: float | None = None
    ) -> bool:
        # In the forward that follows the warm-up the hooks of this object come too late.
        self._before_forward(training=True)
        return False

    def wait(self) -> None:
        self.lane.check()

    def stats(self) -> dict[str, Any]:
        return self.lane.stats()

    def hook_ids(self) -> list[int]:
        return [handle.id for handle in self._handles]

    def check_plan(self) -> None:
        """Raise BaguaError where weights are others than those that are averaged."""
        if (ddp := self._owner()) is not None:
            ddp.check_plan()

    def end_together(self) -> None:
        ran = self.lane.running
        self._leave_at_the_end()
        self.lane.pause()
        self._end_outside()
        if ran and (ddp := self._owner()) is not None:
            with self._connections.collective_phase("ending asynchronous averaging"):
                others, frozen = ddp.bagua_other_buffers(), ddp.bagua_frozen()
                share_untrained([], others, frozen, self._connections)

    def _end_outside(self) -> None:
        if not self.lane.inside:
            with suppress(_C.BaguaError):
                self._take_averages()

    def _take_averages(self) -> None:
        self._take_back(outside=True)
        if self._apart.take_averages() and (ddp := self._owner()) is not None:
            ddp.show_shards()

    def announce_end(self) -> None:
        """:meth:`close` will follow because the program ends well."""
        self._ending = self.lane.running
        self._leave_at_the_end()
        self.lane.ask_to_pause()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        ending, self._ending = self._ending, False
        if ending or self.lane.running:
            warn(
                f"module '{self._name}': asynchronous averaging was still running when its module "
                "or the program ended. Call model.bagua_algorithm.abort(model) on every rank "
                "first: others that train for long after this rank fail in their next average.",
                each_rank=True,
            )
            if ending:
                with suppress(_C.BaguaError):  # others ended before: nothing is left to end
                    self.lane.pause(_SECONDS_FOR_OTHERS_TO_END)
        self.lane.stop()
        self._end_outside()
        for op in self._operations:
            op.plan = None  # the last reference closes the sockets


class _ShardsApart:
    """Shards that stay in torch's memory. Their bucket has a copy while training is outside."""

    def __init__(self, buckets: Sequence[BaguaBucket]) -> None:
        apart = [bucket for bucket in buckets if not bucket.flatten]
        self._buckets = [(bucket, i) for bucket in apart for i in range(len(bucket.tensors))]
        self._versions = [-1] * len(self._buckets)

    def give_weights(self) -> None:
        """Training leaves the gate: the lane averages what the shards hold."""
        for bucket, i in self._buckets:
            bucket.copy_in(i)
        self._versions = [bucket.effective(i)._version for bucket, i in self._buckets]

    def take_averages(self) -> bool:
        """Training enters it: shards that nobody has changed outside get what was averaged.

        False: there are no shards.
        """
        with torch.no_grad():
            for number, (bucket, i) in enumerate(self._buckets):
                shard = bucket.effective(i)
                if shard._version == self._versions[number]:
                    shard.copy_(bucket.view_of(i))
                    self._versions[number] = shard._version
        return bool(self._buckets)


def _only_operation(bucket: BaguaBucket) -> AsynchronousAverage:
    if bucket.asynchronous is None or bucket.ops:
        raise ValueError(
            f"bucket '{bucket.name}': asynchronous averaging cannot be mixed with other operations"
        )
    return bucket.asynchronous
