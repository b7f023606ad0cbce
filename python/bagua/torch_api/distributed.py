"""What communicates for one module: its hooks, buckets and engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bagua import _C, __version__
from bagua.torch_api import _plan, env
from bagua.torch_api._bucketing import split_by_bucket_size
from bagua.torch_api._initial_state import broadcast_optimizer, broadcast_tensors
from bagua.torch_api._module_class import BaguaModule
from bagua.torch_api._outputs import tensors_in
from bagua.torch_api._snapshot import ModuleSnapshot, warn_unused
from bagua.torch_api._user_hooks import backward_hooks, optimizer_hooks
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, overrides
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup, close_at_exit
from bagua.torch_api.tensor import bagua_getter_closure, record_of

__all__ = ["BaguaDistributedDataParallel", "BaguaModule"]


class BaguaDistributedDataParallel:
    """The hooks, buckets and engine of one wrapped module (``module.bagua_ddp``).

    Holds the module weakly: deleting the module frees threads, sockets and memory.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        process_group: BaguaProcessGroup,
        bagua_module_name: str | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self.bagua_optimizers = list(optimizers)
        self.process_group = process_group
        self.bagua_module_name = bagua_module_name or type(module).__name__
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self._snapshot = ModuleSnapshot(module)
        self.bagua_train_step_counter = 0
        self.bagua_buckets: list[BaguaBucket] = []
        self.bagua_algorithm: AlgorithmImpl = algorithm.reify(process_group)
        self.broadcast_buffers = (
            self.bagua_algorithm.broadcast_buffers
            if broadcast_buffers is None
            else broadcast_buffers
        )
        self._require_sync = True
        self._plan: _plan.Plan | None = None
        self._path: _C.GradientPath | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._parameter_handles: list[torch.utils.hooks.RemovableHandle] = []
        self._watching = False
        process_group.transport.agree(
            "the model or the arguments of with_bagua",
            [
                f"bagua {__version__}",
                f"algorithm {algorithm.describe()}",
                f"optimizers {[type(o).__name__ for o in self.bagua_optimizers]}",
                f"do_flatten={gradient_as_bucket_view}",
                f"find_unused_parameters={find_unused_parameters}",
                f"broadcast_buffers={self.broadcast_buffers}",
                f"bucket size {env.get_default_bucket_size()}",
                *self._snapshot.describe(module),
            ],
        )
        self._initialise()
        self._install_module_hooks()
        close_at_exit(self)

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"module '{self.bagua_module_name}' has been deleted")
        return module

    @property
    def parameters_to_ignore(self) -> list[str]:
        """Names of parameters and buffers that are left alone."""
        return self._snapshot.ignored

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """``(name, parameter)`` of all parameters that are trained, not ignored and no experts.

        Parameters shared between modules occur once, under their first name.
        """
        return self._snapshot.trained(self.module)

    # Setting up.

    def _initialise(self) -> None:
        """Rank 0's state for everybody, then tensors, buckets, ops and an engine."""
        self._stop_engine()
        self._broadcast_state()
        algorithm = self.bagua_algorithm
        without_gradient = [p for _, p in self.bagua_build_params() if p.grad is None]
        tensors = algorithm.init_tensors(self)
        groups = split_by_bucket_size(tensors, bagua_getter_closure, env.get_default_bucket_size())
        self.bagua_buckets = algorithm.tensors_to_buckets(groups, self.gradient_as_bucket_view)
        for bucket in self.bagua_buckets:
            algorithm.init_operations(self, bucket)
        for parameter in without_gradient:  # building needs gradients, training starts without
            parameter.grad = None
        if not self.bagua_buckets:
            return
        wrap = self.process_group.transport.next_wrap()
        self._plan = _plan.build(
            self.bagua_buckets, self.process_group, self.bagua_module_name, wrap
        )
        self._places = {
            record_of(tensor).name: (bucket, i)
            for bucket in self.bagua_buckets
            for i, tensor in enumerate(bucket.tensors)
        }
        for bucket in self.bagua_buckets:
            for tensor in bucket.tensors:
                record_of(tensor).marker = weakref.ref(self)
        self._install_gradient_path()

    def _broadcast_state(self) -> None:
        state = self._snapshot.state(self.module) + self._snapshot.buffers(self.module)
        broadcast_tensors(state, self.process_group.transport)
        for optimizer in self.bagua_optimizers:
            broadcast_optimizer(optimizer, self.process_group.transport)

    def _install_gradient_path(self) -> None:
        assert self._plan is not None
        own_wait = overrides(self.bagua_algorithm, "init_post_backward_hook")
        plain = all(bucket.gradients for bucket in self.bagua_buckets)
        # The C++ hooks mark gradients only; what else is registered is marked by the Python hook.
        own_marks = overrides(self.bagua_algorithm, "init_backward_hook")
        own_hook = own_marks or not plain
        this = weakref.ref(self)

        def after_backward() -> None:
            if (ddp := this()) is not None:
                if not own_marks:
                    ddp._mark_unused()
                ddp.bagua_algorithm.init_post_backward_hook(ddp)()

        def on_unused(names: list[str]) -> None:
            if (ddp := this()) is not None:
                warn_unused(ddp.bagua_module_name, names)

        self._path = _C.GradientPath(
            self._plan.engine,
            install_hooks=not own_hook,
            find_unused=self.find_unused_parameters,
            after_backward=None if plain and not own_wait else after_backward,
            on_unused=on_unused,
        )
        if own_hook:
            self._parameter_handles = backward_hooks(self)

    def _install_module_hooks(self) -> None:
        module = self.module
        self._handles = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward),
        ]
        self._handles += optimizer_hooks(self)

    def hook_ids(self) -> list[int]:
        """Ids of the hooks on the module, for copies that must not have them."""
        return [handle.id for handle in self._handles]

    # One step, in the order in which things happen.

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        self._snapshot.check(self.bagua_module_name)
        if self.bagua_algorithm.need_reset():
            self._initialise()
        self.bagua_train_step_counter += 1
        if self._path is None or self._plan is None or not self._require_sync:
            return
        engine = self._plan.engine
        first = not engine.round_open
        self._path.begin_round()
        self._watching = True
        if self.broadcast_buffers and first:
            self._synchronise_buffers()
        self.bagua_algorithm.init_forward_pre_hook(self)(inputs)

    def _synchronise_buffers(self) -> None:
        buffers = self._snapshot.buffers(self.module)
        if not buffers or self.process_group.size == 1:
            return
        assert self._plan is not None
        self._plan.engine.await_agreement()
        broadcast_tensors(buffers, self.process_group.transport)

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._watching and self._path is not None:
            self._watching = False
            self._path.watch(tensors_in(output))

    def mark_tensor_ready(self, tensor: torch.Tensor) -> None:
        """Mark a registered tensor: what ``bagua_mark_communication_ready`` calls."""
        assert self._plan is not None
        assert self._path is not None
        name = record_of(tensor).name
        bucket, index = self._places[name]
        slot = self._plan.slots[name]
        if self._plan.engine.round_open and self._plan.engine.marked(slot):
            raise _C.BaguaError(
                f"tensor '{name}' of module '{self.bagua_module_name}' was marked ready twice in "
                "one round, after its bucket may have been sent"
            )
        if bucket.gradients:
            self._path.adopt(slot)
        else:
            bucket.copy_in(index)
        self._plan.engine.mark_ready(slot)

    def _mark_unused(self) -> None:
        """Momentum and weights of parameters that backward did not reach answer as they are."""
        assert self._plan is not None
        for name, (bucket, index) in self._places.items():
            if not bucket.gradients and not self._plan.engine.marked(self._plan.slots[name]):
                self.mark_tensor_ready(bucket.tensors[index])

    def wait_pending_comm_ops(self) -> None:
        """Block until the buckets that were launched are done.

        Raises:
            BaguaError: something failed on this rank or another.
        """
        if self._plan is None:
            return
        self._plan.engine.wait()
        for bucket in self.bagua_buckets:
            if not bucket.gradients:
                bucket.copy_out()

    @property
    def _bagua_backend(self) -> BaguaDistributedDataParallel:
        """Upstream's spelling: ``bagua_ddp._bagua_backend.wait_pending_comm_ops()``."""
        return self

    @property
    def synchronising(self) -> bool:
        """Whether a backward now would be communicated."""
        return self._require_sync and self._plan is not None and self._plan.engine.round_open

    # Control.

    @property
    def require_backward_grad_sync(self) -> bool:
        """False inside :meth:`no_sync`."""
        return self._require_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication: forward and backward go inside."""
        before = self._require_sync
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(before)

    def _set_sync(self, enabled: bool) -> None:
        self._require_sync = enabled
        if self._path is not None:
            self._path.set_sync(enabled)

    def stats(self) -> dict[str, Any]:
        """What was sent and how long it took, since the buckets were built.

        Returns:
            ``total`` and ``buckets`` (a list): bytes and messages sent and received, and
            nanoseconds busy, on the wire, waiting for the lane, and hidden behind backward;
            ``rounds``; ``exposed_ns``, the time backward waited; ``control``, the agreements.
        """
        if self._plan is None:
            return {"total": {"bytes_sent": 0, "bytes_received": 0}, "buckets": [], "rounds": 0}
        return _plan.with_total(self._plan.engine.stats())

    def _stop_engine(self) -> None:
        for handle in self._parameter_handles:
            handle.remove()
        self._parameter_handles = []
        if self._path is not None:
            self._path.remove_hooks()
        self._path = None
        if self._plan is not None:
            self._plan.engine.stop()
        self._plan = None

    def close(self) -> None:
        """Remove all hooks and stop the threads. The module keeps its weights. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stop_engine()
