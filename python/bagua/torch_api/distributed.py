"""What communicates for one module: its hooks, buckets and engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bagua import __version__
from bagua.torch_api import _plan, _user_hooks, env
from bagua.torch_api._averaging_plan import AveragingPlan
from bagua.torch_api._bucket_ops import AsynchronousOp
from bagua.torch_api._bucketing import split_by_bucket_size
from bagua.torch_api._initial_state import broadcast_optimizer, broadcast_tensors
from bagua.torch_api._module_class import BaguaModule
from bagua.torch_api._outputs import tensors_in
from bagua.torch_api._running_plan import RunningPlan
from bagua.torch_api._snapshot import ModuleSnapshot
from bagua.torch_api._statistics import MainThreadTraffic, statistics
from bagua.torch_api._weights_check import WeightsCheck
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup, close_at_exit
from bagua.torch_api.tensor import bagua_getter_closure

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
        self._main_traffic = MainThreadTraffic(process_group.transport)
        check_every = env.get_check_weights_every()
        self._weights_check = WeightsCheck(
            check_every if self.bagua_algorithm.ranks_agree else 0,
            self.bagua_module_name,
            process_group.transport,
        )
        self._running: RunningPlan | AveragingPlan | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
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
                f"BAGUA_CHECK_WEIGHTS_EVERY={check_every}",
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

    def bagua_floating_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """``(name, buffer)`` of all floating buffers that are not ignored."""
        return self._snapshot.floating_buffers(self.module)

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
        self._main_traffic = MainThreadTraffic(self.process_group.transport)
        name, group, buckets = self.bagua_module_name, self.process_group, self.bagua_buckets
        if isinstance(next(iter(buckets[0].ops), None), AsynchronousOp):
            self._running = AveragingPlan(self, wrap)
        else:
            self._running = RunningPlan(self, _plan.build(buckets, group, name, wrap))
        _plan.log_plan(name, type(algorithm).__name__, group, buckets)

    def _broadcast_state(self) -> None:
        state = self._snapshot.state(self.module) + self._snapshot.buffers(self.module)
        broadcast_tensors(state, self.process_group.transport)
        for optimizer in self.bagua_optimizers:
            broadcast_optimizer(optimizer, self.process_group.transport)

    def _install_module_hooks(self) -> None:
        module = self.module
        self._handles = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward),
        ]
        self._handles += _user_hooks.optimizer_hooks(self)

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
        if self._running is None or not self._require_sync:
            return
        if self._running.begin_round():
            if self.broadcast_buffers:
                self._synchronise_buffers(self._running)
            if self._weights_check.due():
                self._check_weights(self._running)
        self.bagua_algorithm.init_forward_pre_hook(self)(inputs)

    def _synchronise_buffers(self, running: RunningPlan | AveragingPlan) -> None:
        buffers = self._snapshot.buffers(self.module)
        if not buffers or self.process_group.size == 1:
            return
        running.await_agreement()
        with self._main_traffic.counted("buffers"):
            broadcast_tensors(buffers, self.process_group.transport)

    def _check_weights(self, running: RunningPlan | AveragingPlan) -> None:
        running.await_agreement()
        named = self._snapshot.equal_everywhere(self.module, self.broadcast_buffers)
        with self._main_traffic.counted("check"):
            self._weights_check.compare(named, self.bagua_train_step_counter)

    def _after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._running is not None:
            self._running.watch(tensors_in(output))

    def wait_pending_comm_ops(self) -> None:
        """Block until the buckets that were launched are done.

        Raises:
            BaguaError: something failed on this rank or another.
        """
        if self._running is not None:
            self._running.wait()

    @property
    def _bagua_backend(self) -> BaguaDistributedDataParallel:
        """Upstream's spelling: ``bagua_ddp._bagua_backend.wait_pending_comm_ops()``."""
        return self

    @property
    def synchronising(self) -> bool:
        """Whether a backward now would be communicated."""
        running = self._running
        return self._require_sync and running is not None and running.synchronising

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
        if self._running is not None:
            self._running.set_sync(enabled)

    def stats(self) -> dict[str, Any]:
        """See :meth:`BaguaModule.bagua_stats`."""
        running = self._running
        if running is None:
            return statistics(None, [], self._main_traffic)
        return statistics(running.stats(), running.communicators, self._main_traffic)

    def pause(self) -> None:
        """End what goes on between steps (asynchronous averaging). Every rank calls it."""
        if self._running is not None:
            self._running.pause()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside it weights change only by what the caller does."""
        if self._running is None:
            yield
            return
        with self._running.exclusive():
            yield

    def _stop_engine(self) -> None:
        if self._running is not None:
            self._running.stop()
        self._running = None

    def announce_end(self) -> None:
        """:meth:`close` will follow because the program ends well."""
        if self._running is not None:
            self._running.announce_end()

    def close(self) -> None:
        """Remove all hooks and stop the threads. The module keeps its weights. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stop_engine()
