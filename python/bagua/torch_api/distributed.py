"""What communicates for one module: its hooks, buckets and engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from bagua import BaguaError
from bagua.torch_api import _plan, _user_hooks, env
from bagua.torch_api._averaging_plan import AveragingPlan
from bagua.torch_api._bucket_ops import AsynchronousOp
from bagua.torch_api._bucketing import split_by_bucket_size
from bagua.torch_api._initial_state import InitialState
from bagua.torch_api._module_class import BaguaModule
from bagua.torch_api._outputs import tensors_in
from bagua.torch_api._outside_graphs import outside_graphs
from bagua.torch_api._running_plan import RunningPlan
from bagua.torch_api._shared_state import SharedState, UnevenInputs
from bagua.torch_api._snapshot import ModuleSnapshot
from bagua.torch_api._statistics import statistics
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import BaguaProcessGroup, close_at_exit
from bagua.torch_api.tensor import bagua_getter_closure

__all__ = ["BaguaDistributedDataParallel", "BaguaModule"]


class BaguaDistributedDataParallel:
    """The hooks, buckets and engine of one wrapped module (``module.bagua_ddp``).

    Holds the module weakly: deleting the module frees threads, sockets and memory.

    Args:
        bucket_bytes: after which a bucket is closed; None: ``BAGUA_DEFAULT_BUCKET_SIZE``.
        initial_state: what the first rank gives to all.
        hook_module: False: the caller calls :meth:`before_forward` and :meth:`after_forward`.
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
        *,
        bucket_bytes: int | None = None,
        initial_state: InitialState = "all",
        hook_module: bool = True,
        grad_scaler: torch.amp.GradScaler | None = None,
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
        own = self.bagua_algorithm.broadcast_buffers
        self.broadcast_buffers = own if broadcast_buffers is None else broadcast_buffers
        self.uneven_inputs = UnevenInputs()
        self._bucket_bytes = bucket_bytes or env.get_default_bucket_size()
        self._initial_state = initial_state
        self._grad_scaler = grad_scaler
        self._require_sync = True
        self._shared = SharedState(
            self._snapshot,
            self.bagua_optimizers,
            process_group.transport,
            self.bagua_module_name,
            with_buffers=self.broadcast_buffers,
            ranks_agree=self.bagua_algorithm.ranks_agree,
        )
        self._running: RunningPlan | AveragingPlan | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        arguments = {
            "algorithm ": algorithm.describe(),
            "optimizers ": [type(optimizer).__name__ for optimizer in self.bagua_optimizers],
            "do_flatten=": gradient_as_bucket_view,
            "find_unused_parameters=": find_unused_parameters,
            "broadcast_buffers=": self.broadcast_buffers,
            "grad_scaler=": grad_scaler is not None and grad_scaler.is_enabled(),
            "bucket size ": self._bucket_bytes,
            "initial state ": initial_state,
        }
        process_group.transport.agree(
            "the model or the arguments of with_bagua", self._shared.describe(module, arguments)
        )
        self._initialise()
        self._install_hooks(hook_module)
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
        if self._initial_state != "nothing":
            self.give_state(0, buffers=self._initial_state == "all")
        algorithm = self.bagua_algorithm
        without_gradient = [p for _, p in self.bagua_build_params() if p.grad is None]
        tensors = algorithm.init_tensors(self)
        groups = split_by_bucket_size(tensors, bagua_getter_closure, self._bucket_bytes)
        self.bagua_buckets = algorithm.tensors_to_buckets(groups, self.gradient_as_bucket_view)
        for bucket in self.bagua_buckets:
            algorithm.init_operations(self, bucket)
        for parameter in without_gradient:  # building needs gradients, training starts without
            parameter.grad = None
        if not self.bagua_buckets:
            return
        wrap = self.process_group.transport.next_wrap()
        self._shared.restart_counting()
        name, group, buckets = self.bagua_module_name, self.process_group, self.bagua_buckets
        if isinstance(next(iter(buckets[0].ops), None), AsynchronousOp):
            self._running = AveragingPlan(self, wrap)
        else:
            self._running = RunningPlan(self, _plan.build(buckets, group, name, wrap))
        self._running.set_sync(self._require_sync)
        _plan.log_plan(name, type(algorithm).__name__, group, buckets)

    def give_state(self, source: int, buffers: bool) -> None:
        """Give every rank the parameters, optimizer state and perhaps buffers of ``source``."""
        self._shared.give(self.module, source, buffers)

    def _install_hooks(self, hook_module: bool) -> None:
        if hook_module:
            self._handles = [
                self.module.register_forward_pre_hook(outside_graphs(self.before_forward)),
                self.module.register_forward_hook(outside_graphs(self.after_forward)),
            ]
        self._handles += _user_hooks.optimizer_hooks(self)

    def replace_algorithm(self, algorithm: AlgorithmImpl) -> None:
        """Communicate by ``algorithm`` from now on: new buckets. Every rank calls it."""
        self.bagua_algorithm = algorithm
        self._initialise()

    def hook_ids(self) -> list[int]:
        """Ids of the hooks on the module, for copies that must not have them."""
        of_plan = [] if self._running is None else self._running.hook_ids()
        return [handle.id for handle in self._handles] + of_plan

    # One step, in the order in which things happen.

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Open the round of a training forward; nothing in ``eval()`` or without gradients."""
        if not (module.training and torch.is_grad_enabled()):
            return
        self._snapshot.check(self.bagua_module_name)
        self._run_pending()
        if self.bagua_algorithm.need_reset():
            self._initialise()
        self.bagua_train_step_counter += 1
        if self._running is None or not self._require_sync:
            return
        grad_scale = self._grad_scaler.get_scale() if self._grad_scaler is not None else 1.0
        if self._running.begin_round(grad_scale, self.uneven_inputs.result_scale):
            self._synchronise_state()
        self.bagua_algorithm.init_forward_pre_hook(self)(inputs)

    def _run_pending(self) -> None:
        if self.bagua_algorithm.mark_pending(self):
            self.wait_pending_comm_ops()

    def _synchronise_state(self) -> None:
        assert isinstance(self._running, RunningPlan)
        step = self.bagua_train_step_counter
        self._shared.before_round(self.module, self._running, self.uneven_inputs, step)

    def shadow_round(self) -> None:
        """Answer a round of the ranks that still have inputs, with zero gradients."""
        if isinstance(self._running, RunningPlan):
            self._running.shadow_round(self._synchronise_state, self)

    def after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Have the backward through ``output`` end the round."""
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
        """False inside :meth:`no_sync`; may be set."""
        return self._require_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        self._require_sync = enabled
        if self._running is not None:
            self._running.set_sync(enabled)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication: forward and backward go inside."""
        before = self._require_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def stats(self) -> dict[str, Any]:
        """See :meth:`BaguaModule.bagua_stats`."""
        return statistics(self._running, self._shared.traffic)

    def pause(self) -> None:
        """End what goes on between steps (asynchronous averaging). Every rank calls it."""
        if self._running is not None:
            self._running.pause()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside it weights change only by what the caller does; what is due runs before."""
        self._run_pending()
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
        if isinstance(self._running, RunningPlan):
            with suppress(BaguaError):  # this rank or another has failed, and said so
                if self.bagua_algorithm.mark_pending(self):
                    self._running.finish_soon()
        self._stop_engine()
        self.bagua_algorithm.close()
