"""The engine of a wrapped module: the hooks that mark its tensors, and the calls of one step."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bagua import _C
from bagua._core.state.bagua_tensor import record_of
from bagua._core.state.snapshot import warn_past_wrapper, warn_unused
from bagua._sync.hooks import WeakHook
from bagua._sync.plan import build, finish_soon, part_of_the_round
from bagua._sync.synchronizer import Synchronizer

if TYPE_CHECKING:
    from bagua.torch_api._session import Session


class EngineSynchronizer(Synchronizer):
    """The engine of a module's buckets, from one (re)build of the buckets to the next."""

    makes_rounds = True

    def __init__(self, ddp: Session) -> None:
        super().__init__()
        buckets, group = ddp.bagua_buckets, ddp.process_group
        wrap = group.connections.next_wrap()
        plan = build(buckets, group, ddp.bagua_module_name, wrap, ddp.weights_sample())
        self.engine = plan.engine
        self.communicators = plan.communicators
        self.non_finite = plan.non_finite
        self._buckets = buckets
        self._slots = plan.slots
        self._places = {
            record_of(tensor).name: (bucket, i)
            for bucket in self._buckets
            for i, tensor in enumerate(bucket.tensors)
        }
        for bucket in self._buckets:
            for tensor in bucket.tensors:
                record_of(tensor).marker = weakref.ref(self)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._path = self._make_path(ddp)
        self._begun = 0  # the last round that step_begins() was called for

    def _make_path(self, ddp: Session) -> _C.GradientPath:
        algorithm = ddp.bagua_algorithm
        own_marks = algorithm.overrides("init_backward_hook")
        own_wait = algorithm.overrides("init_post_backward_hook")
        checks = algorithm.overrides("init_pre_backward_hook")
        # The C++ hooks mark gradients; what else is registered is marked at the end of backward.
        plain = all(bucket.gradients for bucket in self._buckets)
        marks_at_end = not plain and not own_marks and not algorithm.traits.opens_at_forward
        # Weights that are communicated hold still in backward.
        weights: list[tuple[str, torch.Tensor]] = []
        if algorithm.traits.opens_at_forward:
            weights += ddp.bagua_build_params()
        owner = weakref.ref(ddp)
        this = weakref.ref(self)

        def after_backward() -> None:
            ddp, running = owner(), this()
            if ddp is not None and running is not None:
                if marks_at_end:
                    running.mark_all()
                ddp.bagua_algorithm.init_post_backward_hook(ddp)()

        def before_backward() -> None:
            if (ddp := owner()) is not None:
                ddp.bagua_algorithm.init_pre_backward_hook(ddp)()

        if own_marks:
            self._handles = _backward_hooks(ddp)
        return _C.GradientPath(
            self.engine,
            install_hooks=not own_marks,
            find_unused=ddp.find_unused_parameters,
            static_graph=ddp.static_graph,
            weights=weights,
            open_round=WeakHook(ddp.open_round_in_backward),
            before_backward=before_backward if checks else None,
            after_backward=None if plain and not own_wait else after_backward,
            after_gradients=WeakHook(ddp.after_gradients),
            on_unused=partial(warn_unused, ddp.bagua_module_name),
            on_past_wrapper=partial(warn_past_wrapper, ddp.bagua_module_name),
        )

    # One step, in the order in which things happen.

    def begin_forward(self, communicates: bool) -> None:
        self._path.begin_forward(communicates)

    def call_after_gradients(self, enabled: bool) -> None:
        self._path.call_after_gradients(enabled)

    def step_begins(self, grad_scale: float = 1.0, result_scale: float = 1.0) -> bool:
        self._path.begin_round(grad_scale, result_scale)
        before, self._begun = self._begun, self.engine.round
        return self._begun != before

    def begin_without_inputs(self, result_scale: float) -> None:
        self.engine.begin_round(check_weights=False)  # no inputs, no optimizer's step
        self.step_begins(1.0, result_scale)

    def agree_on_unfreezing(self, names: list[str]) -> None:
        digest = hashlib.blake2b("\n".join(names).encode(), digest_size=8).digest()
        self.engine.begin_round(frozen=int.from_bytes(digest, "little"))
        self.engine.await_agreement()

    @contextmanager
    def part_of_the_round(self) -> Iterator[None]:
        if not self.engine.round_open:
            self.engine.begin_round()
        self.engine.await_agreement()
        with part_of_the_round(self.engine):
            yield

    def watch(self, outputs: list[torch.Tensor]) -> None:
        self._path.watch(outputs)

    @property
    def in_backward(self) -> bool:
        return self._path.in_backward

    def mark_tensor_ready(self, tensor: torch.Tensor) -> None:
        """Mark a registered tensor, for ``bagua_mark_communication_ready``."""
        name = record_of(tensor).name
        bucket, index = self._places[name]
        slot = self._slots[name]
        if self.engine.round_open and self.engine.marked(slot):
            raise _C.BaguaError(
                f"tensor '{name}' was marked ready twice in one round, after its bucket may have "
                "been sent; mark each tensor once"
            )
        if bucket.gradients:
            self._path.adopt(slot)
        else:
            bucket.copy_in(index)
        self.engine.mark_ready(slot)

    def mark_all(self) -> None:
        for bucket in self._buckets:
            if bucket.gradients or bucket.check_flatten():
                continue
            for index, tensor in enumerate(bucket.tensors):
                if not self.engine.marked(self._slots[record_of(tensor).name]):
                    bucket.copy_in(index)
        self.engine.mark_all()

    def answer_with_zeros(self) -> None:
        self._path.answer_with_zeros()

    def wait(self) -> None:
        self.engine.wait()
        for bucket in self._buckets:
            if not bucket.gradients:
                bucket.copy_out()

    def finish_soon(self) -> None:
        if finish_soon(self.engine, self.engine.round * len(self._buckets)):
            self.wait()

    @property
    def synchronising(self) -> bool:
        return self.engine.round_open

    @property
    def communicating(self) -> bool:
        return self._path.communicating

    # Control.

    def settle(self) -> None:
        self.engine.settle()

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._path.remove_hooks()
        self.engine.stop()


def _backward_hooks(ddp: Session) -> list[torch.utils.hooks.RemovableHandle]:
    """The algorithm's own backward hook, on every parameter that is trained."""
    this = weakref.ref(ddp)
    handles = []
    for name, parameter in ddp.bagua_build_params():

        def hook(p: Any, name: str = name) -> None:
            session = this()
            if session is not None and session.communicates_in_backward:
                session.bagua_algorithm.init_backward_hook(session)(name, p)

        handles.append(parameter.register_post_accumulate_grad_hook(hook))
    return handles
