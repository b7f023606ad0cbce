"""The wrapper of one module: its hooks, buckets and synchronizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bagua import _C, BaguaError
from bagua._core.group import environment as env
from bagua._core.group.process_group import BaguaProcessGroup, close_at_exit
from bagua._core.state.initial_state import InitialState
from bagua._core.state.snapshot import ModuleSnapshot
from bagua._core.state.statistics import statistics
from bagua._guard.guard import Guard
from bagua._sync import owners
from bagua._sync.engine_synchronizer import EngineSynchronizer
from bagua._sync.hooks import tensors_in
from bagua._sync.missing_steps import MissingSteps
from bagua._sync.plan import log_plan, log_unfrozen
from bagua._sync.steps_in_backward import StepsInBackward
from bagua._sync.synchronizer import Synchronizer
from bagua._watch.publisher import publish
from bagua.torch_api._wrapping.agreement import agree_on_wrap, refuse_communicating_optimizers
from bagua.torch_api._wrapping.buckets import (
    agree_on_unfrozen,
    make_buckets,
    rebuild_with_state,
)
from bagua.torch_api._wrapping.ending import finish_rounds, refuse_to_train_alone
from bagua.torch_api._wrapping.guarding import guard_of
from bagua.torch_api._wrapping.module_hooks import install_hooks
from bagua.torch_api._wrapping.round_opening import RoundOpening, scales_gradients
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["BaguaDistributedDataParallel"]


class BaguaDistributedDataParallel:
    """The hooks, buckets and engine of one wrapped module (``module.bagua_ddp``).

    Holds the module weakly: deleting the module frees threads, sockets and memory.

    Attributes:
        opening: opens its rounds.
        guard: watches what the algorithm loses; None: nobody does.
        require_backward_grad_sync: whether forwards communicate; set through ``BaguaModule``.

    Args:
        static_graph: every backward reaches the same parameters, each equally often.
        bucket_bytes: after which a bucket is closed; None: ``BAGUA_DEFAULT_BUCKET_SIZE``.
        initial_state: broadcast by the first rank.
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
        static_graph: bool = False,
        bucket_bytes: int | None = None,
        initial_state: InitialState = "all",
        hook_module: bool = True,
        grad_scaler: torch.amp.GradScaler | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self.bagua_optimizers = list(optimizers)
        self.process_group = process_group
        self.bagua_module_name = bagua_module_name or type(module).__name__
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self._snapshot = ModuleSnapshot(module)
        self.bagua_train_step_counter = 0
        self.bagua_buckets: list[BaguaBucket] = []
        self.bagua_algorithm: AlgorithmImpl = algorithm.reify(process_group)
        process_group.refuse_before_joining()
        self._snapshot.refuse_unsupported(module, self.bagua_algorithm)
        refuse_communicating_optimizers(self)
        self._asked_guard = guard
        self.guard = guard_of(guard, self.bagua_algorithm, self)
        own = self.bagua_algorithm.broadcast_buffers
        self.broadcast_buffers = own if broadcast_buffers is None else broadcast_buffers
        self._bucket_bytes = bucket_bytes or env.get_default_bucket_size()
        self.require_backward_grad_sync = True
        self._watching = False
        self._ended = False
        self._shared = agree_on_wrap(
            self,
            self._snapshot,
            algorithm.describe(),
            initial_state,
            bucket_bytes=self._bucket_bytes,
            scales_gradients=scales_gradients(grad_scaler),
        )
        self.opening = RoundOpening(self._shared, grad_scaler)
        self._running: Synchronizer | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._claim_parameters()
        self._initialise()
        self._handles = install_hooks(self, self._settle, on_forwards=hook_module)
        self._missing_steps = self._watch_steps()
        close_at_exit(self)
        publish(self)

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"module '{self.bagua_module_name}' has been deleted")
        return module

    @property
    def scales_gradients(self) -> bool:
        """Whether the wrap was given a scaler that multiplies the loss."""
        return self.opening.scales_gradients

    @property
    def joining(self) -> bool:
        """Whether rounds are those of ``join()``, in which ranks may have no inputs."""
        return self.opening.eager

    @property
    def parameters_to_ignore(self) -> set[str]:
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

    def bagua_whole_buffers(self) -> list[torch.Tensor]:
        """All buffers that are neither floating nor ignored."""
        return [b for b in self._snapshot.buffers(self.module) if not b.is_floating_point()]

    # Setting up.

    def _claim_parameters(self) -> None:
        owners.claim(self)
        self._steps_in_backward = StepsInBackward(
            self.bagua_module_name, self.bagua_build_params(), self.bagua_algorithm
        )

    def _watch_steps(self) -> MissingSteps | None:
        """Watch that the given optimizers step, where the algorithm depends on it."""
        if self.bagua_algorithm.steps_in_backward or not self.bagua_optimizers:
            return None
        missing = MissingSteps(
            self.bagua_module_name,
            type(self.bagua_algorithm).__name__.removesuffix("Impl"),
            self.bagua_optimizers,
            [p for _, p in self.bagua_build_params()],
        )
        self._handles += missing.handles
        return missing

    def _initialise(self, *, gives_state: bool = True) -> None:
        """Broadcast rank 0's state, then build tensors, buckets, ops and an engine."""
        self._stop_engine()
        if gives_state:
            self._shared.give_initial(self.module)
        algorithm = self.bagua_algorithm
        make_buckets(self, self._bucket_bytes)
        if not self.bagua_buckets:
            return
        self._shared.restart_counting()
        self._running = algorithm.make_synchronizer(self)
        log_plan(
            self.bagua_module_name, type(algorithm).__name__, self.process_group, self.bagua_buckets
        )

    def weights_sample(self) -> _C.WeightsSample | None:
        """The part of the weights that each round compares; None: nothing."""
        return self._shared.weights_sample(self.module, self.bagua_algorithm.ranks_agree)

    @property
    def _rounds(self) -> EngineSynchronizer | None:
        return None if self._running is None else self._running.rounds

    def welcome(self) -> None:
        """Take part in the wraps of ranks that join, before :meth:`rebuild`."""
        self._shared.welcome(self.module)

    def give_state(self, source: int, buffers: bool) -> None:
        """Give every rank the parameters, optimizer state and perhaps buffers of ``source``."""
        self._shared.give(self.module, source, buffers)

    def replace_algorithm(self, algorithm: AlgorithmImpl) -> None:
        """Communicate by ``algorithm`` from now on: new buckets. Every rank calls it."""
        self._snapshot.refuse_unsupported(self.module, algorithm)
        self.guard = guard_of(self._asked_guard, algorithm, self)
        self.bagua_algorithm = algorithm
        self.rebuild()

    def _take_unfrozen(self) -> None:
        """Build new buckets, with the parameters that were frozen at the wrap and no longer are.

        Raises:
            BaguaMismatchError: another rank has not unfrozen the same.
        """
        rounds = self._rounds
        assert rounds is not None
        names = agree_on_unfrozen(self, self._snapshot, rounds)
        if names:
            owners.release(self)
            self._steps_in_backward.close()
            self._claim_parameters()
            log_unfrozen(self.bagua_module_name, names)
            rebuild_with_state(self)

    def rebuild(self) -> None:
        """Build new buckets; weights and optimizer state stay as training has changed them."""
        self._initialise(gives_state=False)

    def hook_ids(self) -> list[int]:
        """Ids of the hooks on the module, for copies that must not have them."""
        of_plan = [] if self._running is None else self._running.hook_ids()
        return [handle.id for handle in self._handles] + of_plan

    # One step, in the order in which things happen.

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Prepare a forward: Note [Which backward communicates] in the C++ core.

        One in training mode opens its round here, one in ``eval()`` in its backward: a rank that
        evaluates alone, with gradients enabled, does not wait.

        Raises:
            BaguaError: the module has changed since the wrap, its process group is gone, or another
                rank failed.
        """
        self._watching = False
        rounds = self._rounds
        if rounds is not None and rounds.in_backward:
            return  # recomputed for an activation checkpoint
        with_gradients = torch.is_grad_enabled()
        syncs = with_gradients and self.require_backward_grad_sync
        communicates = syncs and self._snapshot.trains(module)
        now = module.training or self.opening.eager or self.bagua_algorithm.opens_at_forward
        if self._ended:
            return refuse_to_train_alone(self.bagua_module_name) if communicates else None
        if with_gradients and now:
            between = rounds is not None and not rounds.synchronising
            takes = between and self.bagua_algorithm.takes_unfrozen
            if self._snapshot.check(module, self.bagua_module_name, unfreezing=takes):
                self._take_unfrozen()
                rounds = self._rounds
            self._run_pending()
        if communicates and now and self._missing_steps is not None:
            self._missing_steps.at_forward()
        if communicates and self.bagua_algorithm.need_reset():
            self._initialise(gives_state=self.bagua_algorithm.reset_gives_state)
            rounds = self._rounds
        if self._running is None:
            return
        if with_gradients and (now or not syncs):
            self.bagua_train_step_counter += 1
        if with_gradients and rounds is not None:
            rounds.begin_forward(communicates)
            rounds.call_after_gradients(self._steps_in_backward.take_over())
        opens = communicates and now and not (self.opening.eager and self.synchronising)
        self.opening.at_forward(self, self._running, syncs=syncs, opens=opens)
        if opens:
            self.bagua_algorithm.init_forward_pre_hook(self)(inputs)
        self._watching = communicates

    def _run_pending(self) -> None:
        if self.bagua_algorithm.mark_pending(self):
            self.wait_pending_comm_ops()

    def open_round_in_backward(self) -> None:
        """Open the round of a backward whose forward has not opened it.

        That forward was in ``eval()``, or has had a backward already.

        Raises:
            BaguaError: inside ``join()``, or with an algorithm that averages weights, a forward has
                one backward.
        """
        self.opening.refuse_in_backward(self)
        self.bagua_train_step_counter += 1
        self._snapshot.check(self.module, self.bagua_module_name)
        assert self._running is not None
        self.opening.in_backward(self, self._running)
        self.bagua_algorithm.init_forward_pre_hook(self)(())

    def shadow_round(self) -> None:
        """Answer a round of the ranks that still have inputs, with zero gradients."""
        if (rounds := self._rounds) is not None:
            self.opening.without_inputs(self, rounds)
            rounds.answer_with_zeros()

    def after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Have every backward through ``output`` communicate, if the forward does."""
        if self._watching and (rounds := self._rounds) is not None:
            self._watching = False
            rounds.watch(tensors_in(output))

    def opens_round(self) -> bool:
        """Whether a forward now would open a round."""
        syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
        return syncs and not self.synchronising and self._snapshot.trains(self.module)

    def before_inner_backward(self, loss: torch.Tensor) -> None:
        """Have a backward from ``loss`` inside the module's forward communicate, or not.

        ``no_sync()`` around this call decides. Without the call the outer forward decides, and
        algorithms that average weights do not notice such a backward. They begin another round here
        if an earlier backward has ended the forward's.
        """
        if (rounds := self._rounds) is None:
            return
        communicates = self.require_backward_grad_sync and self._snapshot.trains(self.module)
        if not self.bagua_algorithm.opens_at_forward:
            rounds.begin_forward(communicates)
            return
        if self.synchronising:
            rounds.begin_forward(communicates)
        else:
            self.before_forward(self.module, ())
        if communicates:
            rounds.watch(tensors_in(loss))

    def share_buffers(self, enabled: bool) -> None:
        """Give every rank the first rank's buffers from the next forward on, or no longer."""
        self.broadcast_buffers = enabled
        self._shared.with_buffers = enabled

    def after_gradients(self) -> None:
        """Make the steps of ``_apply_optimizer_in_backward``, with communicated gradients."""
        self._steps_in_backward.step()

    def mark_all_ready(self) -> None:
        """Mark every registered tensor that is not marked yet.

        Raises:
            BaguaError: no round is open, or something failed on this rank or another.
        """
        if (rounds := self._rounds) is not None:
            rounds.mark_all()

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
        """Whether a round is open: the next backward that communicates is in it."""
        return (rounds := self._rounds) is not None and rounds.synchronising

    @property
    def communicates_in_backward(self) -> bool:
        """Whether the backward that is running is communicated."""
        return (rounds := self._rounds) is not None and rounds.communicating

    # Control.

    def stats(self) -> dict[str, Any]:
        """See :meth:`BaguaModule.bagua_stats`."""
        stats = statistics(self._running, self._shared.traffic)
        stats |= self.bagua_algorithm.statistics()
        return stats if self.guard is None else stats | {"guard": self.guard.stats()}

    def pause(self) -> None:
        """End work between steps (asynchronous averaging). Every rank calls it."""
        if self._running is not None:
            self._running.end_together()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside it weights change only by what the caller does; what is due runs before."""
        self._run_pending()
        if self._running is None:
            yield
            return
        with self._running.exclusive():
            yield

    def _settle(self) -> None:
        if (rounds := self._rounds) is not None:
            rounds.engine.settle()

    def _stop_engine(self) -> None:
        if self._running is not None:
            self._running.close()
        self._running = None

    def close(self) -> None:
        """Remove all hooks and stop the threads. The module keeps its weights. Idempotent.

        Raises:
            BaguaError: see :meth:`end_with_group`.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.end_with_group()

    def end_with_group(self) -> None:
        """Stop the threads because the process group ends.

        From then on a forward that would communicate raises. Idempotent.

        Raises:
            BaguaError: the device has failed at the last steps, and no step has raised that.
        """
        if self._ended:
            return
        self._ended = True
        late_failure: BaguaError | None = None
        if (rounds := self._rounds) is not None:
            late_failure = finish_rounds(self, rounds)
        self._stop_engine()
        self.bagua_algorithm.close()
        self._steps_in_backward.close()
        owners.release(self)
        if late_failure is not None:
            raise late_failure
