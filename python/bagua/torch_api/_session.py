"""``Session``: what ``bagua.wrap`` leaves on a module, ``module.bagua_ddp``.

In the order of the calls: the wrap (checks, agreement, state, buckets, operations, start), one
training step, changes while training goes on, and the end.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from bagua import _C, BaguaError, __version__
from bagua._core.group import environment as env
from bagua._core.group.connections import MainThreadTraffic
from bagua._core.group.process_group import BaguaProcessGroup, close_at_exit
from bagua._core.group.warn import warn
from bagua._core.state.bagua_tensor import bagua_getter_closure, is_sparse
from bagua._core.state.initial_state import (
    InitialState,
    broadcast_state,
    broadcast_tensors,
)
from bagua._core.state.shards import is_sharded, ranks_of
from bagua._core.state.snapshot import ModuleSnapshot, sample
from bagua._core.state.statistics import statistics
from bagua._sync.hooks import WeakHook, outside_graphs, tensors_in
from bagua._sync.optimizer_steps import MissingSteps, only_makes_state, part_of_a_step
from bagua._sync.samples import SaidSamples
from bagua._sync.synchronizer import Synchronizer
from bagua._watch.publisher import publish
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, name_of
from bagua.torch_api.bucket import BaguaBucket, split_by_bucket_size
from bagua.torch_api.guard import Guard, GuardAtWork

if TYPE_CHECKING:
    from bagua.torch_api.data_parallel._join import RanksWithInputs

_log = logging.getLogger("bagua")

_CHECK_WEIGHTS_EVERY = 100  # rounds in which each element of the weights is compared once


class Session:
    """The hooks, buckets and lanes of one wrapped module.

    Holds the module weakly: deleting the module frees threads, sockets and memory. Arguments are
    those of ``bagua.wrap`` and ``DistributedDataParallel``.

    Args:
        initial_state: broadcast by the first rank.
        hook_module: False: the caller calls :meth:`before_forward` and :meth:`after_forward`.
        replaces: the session of an earlier wrap. It ends when the ranks have agreed on this one; if
            this one fails after that, the module refuses to train.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        process_group: BaguaProcessGroup,
        bagua_module_name: str | None = None,
        gradient_as_bucket_view: bool | None = True,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool | None = None,
        *,
        static_graph: bool = False,
        bucket_bytes: int | None = None,
        initial_state: InitialState = "all",
        hook_module: bool = True,
        grad_scaler: torch.amp.GradScaler | None = None,
        guard: Guard | None = None,
        replaces: Session | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self.bagua_optimizers = list(optimizers)
        self.process_group = process_group = algorithm.within(process_group)
        self.bagua_module_name = bagua_module_name or type(module).__name__
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.require_backward_grad_sync = True  # set through BaguaModule
        self.scales_gradients = grad_scaler is not None and grad_scaler.is_enabled()
        # Inside join(), where rounds open at the forward in eval() too, once per round.
        self.joining: RanksWithInputs | None = None
        # The next forward gets the first rank's buffers: it is the first, or the one before
        # communicated.
        self.buffers_due = True
        self.samples = SaidSamples()  # by which this rank weighs in the next round
        self.bagua_train_step_counter = 0
        self.bagua_buckets: list[BaguaBucket] = []
        self.bagua_algorithm: AlgorithmImpl = algorithm.reify(process_group)
        traits = self.bagua_algorithm.traits
        if gradient_as_bucket_view is None:
            gradient_as_bucket_view = traits.needs_flat_buckets
        self.gradient_as_bucket_view = gradient_as_bucket_view
        if broadcast_buffers is None:
            broadcast_buffers = traits.broadcast_buffers
        self.broadcast_buffers = broadcast_buffers
        device = next((p.device.type for p in module.parameters()), "cpu")
        self._bucket_bytes = bucket_bytes or env.get_default_bucket_size(device)
        self._initial_state = initial_state
        self._grad_scaler = grad_scaler
        self._asked_guard = guard
        self._snapshot = ModuleSnapshot(module, averaged_inside=self._averaged_inside(module))
        self._running = Synchronizer()
        self._built = 0  # times
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._watching = False
        self._ended = ""  # why it has, for the error of forwards

        self._check(module)
        self.guard = self._guard_of(self.bagua_algorithm)
        self._description = self._describe(module, algorithm)
        self._agree()
        if replaces is not None:
            replaces.pause()
            replaces.end("the wrap that was to replace its algorithm failed")
        try:
            self._claim_parameters()
            self._warn_of_nothing_to_train(module)
            self._handles += self._watch_kept_weights()
            self._build(gives_state=True)
            self._install_hooks(module, on_forwards=hook_module)
            self._missing_steps = self._watch_steps()
        except BaseException:
            self._undo()
            raise
        if replaces is not None:
            replaces.close()
        close_at_exit(self)
        if seconds := env.get_top_seconds():
            publish(self, seconds)

    # The module, as algorithms see it.

    @property
    def module(self) -> torch.nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError(f"module '{self.bagua_module_name}' has been deleted")
        return module

    @property
    def parameters_to_ignore(self) -> set[str]:
        return self._snapshot.ignored

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """``(name, parameter)`` of all that are trained, shared ones once; no experts."""
        return self._snapshot.trained(self.module)

    def check_plan(self) -> None:
        """Raise BaguaError where the module has other parameters than those that are averaged."""
        self._snapshot.check(self.module, self.bagua_module_name, unfreezing=True)

    def show_shards(self) -> None:
        """Have the next forward gather shards anew, where FSDP2 has left whole parameters."""
        self._snapshot.show_shards(self.module)

    def bagua_mean_buffers(self, chosen: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Buffers that get the ranks' mean, by name; ``chosen``: instead of the algorithm's."""
        if chosen is None:
            chosen = self.bagua_algorithm.mean_buffers
        return self._snapshot.mean_buffers(self.module, chosen)

    def bagua_other_buffers(self) -> list[torch.Tensor]:
        """Buffers of which ranks share one rank's."""
        averaged = {id(buffer) for buffer in self.bagua_mean_buffers().values()}
        return [b for b in self._snapshot.buffers(self.module) if id(b) not in averaged]

    def bagua_frozen(self) -> list[torch.Tensor]:
        """Parameters that no algorithm communicates."""
        return self._snapshot.frozen(self.module)

    # The wrap: checks of this rank alone.

    def _check(self, module: torch.nn.Module) -> None:
        self.process_group.refuse_before_joining()
        self._snapshot.refuse_unsupported(module, self.bagua_algorithm)
        if self.process_group.size > 1:
            self._snapshot.refuse_buffers(module)
        self._refuse_shards_of_the_group()
        if self.bagua_algorithm.traits.steps_on_gradients:
            return
        # Not at the top: most algorithms need nothing of it.
        from bagua._sync.communicating_optimizers import refuse_at_sight
        from bagua._sync.kept_weights import refuse_others

        names = self.bagua_module_name, name_of(self.bagua_algorithm)
        refuse_at_sight(*names, self.bagua_optimizers)
        refuse_others(*names, self.bagua_optimizers, module)

    def _averaged_inside(self, module: torch.nn.Module) -> bool:
        """Whether torch averages gradients between ranks of which the group has only this one."""
        if self.bagua_algorithm.traits.steps_on_gradients:
            return False
        group = self.process_group.torch_ranks
        inside = [
            group.isdisjoint({*dist.get_process_group_ranks(m.process_group)} - {dist.get_rank()})
            for m in module.modules()
            if isinstance(m, torch.nn.parallel.DistributedDataParallel)
            and hasattr(m, "process_group")
        ]
        return bool(inside) and all(inside)

    def _refuse_shards_of_the_group(self) -> None:
        group = self.process_group.torch_ranks
        for name, parameter in self.bagua_build_params():
            if is_sharded(parameter) and len(between := group & ranks_of(parameter)) > 1:
                raise ValueError(
                    f"parameter '{name}' is a DTensor between ranks {sorted(between)}, which "
                    "process_group= would average with each other. Give the ranks that hold the "
                    'same shard in other islands: process_group=mesh["island"] of a mesh of '
                    "islands and shards"
                )

    def _guard_of(self, algorithm: AlgorithmImpl) -> GuardAtWork | None:
        traits = algorithm.traits
        guard = traits.default_guard if self._asked_guard is None else self._asked_guard
        if guard is None:
            return None
        if traits.refuses_guard:
            raise ValueError(f"guard= with {type(algorithm).__name__}: {traits.refuses_guard}")
        return GuardAtWork(
            guard,
            self.bagua_module_name,
            self.process_group,
            ranks_agree=traits.ranks_agree is True,
            adaptive=any({"betas", "eps"} & set(o.defaults) for o in self.bagua_optimizers),
        )

    # The wrap: the ranks' agreement.

    def _describe(self, module: torch.nn.Module, algorithm: Algorithm) -> list[str]:
        every = env.get_check_weights_every()
        fields = {
            "bagua ": __version__,
            "algorithm ": algorithm.describe(),
            "optimizers ": [type(optimizer).__name__ for optimizer in self.bagua_optimizers],
            "do_flatten=": self.gradient_as_bucket_view,
            "find_unused_parameters=": self.find_unused_parameters,
            "static_graph=": self.static_graph,
            "broadcast_buffers=": self.broadcast_buffers,
            "grad_scaler=": self.scales_gradients,
            "bucket size ": self._bucket_bytes,
            "guard ": None if self.guard is None else self.guard.guard,
            "initial state ": self._initial_state,
            "BAGUA_CHECK_WEIGHTS_EVERY=": "unset" if every is None else every,
            "BAGUA_CHECKSUM=": int(env.get_checksum()),
        }
        lines = [f"{name}{value}" for name, value in fields.items()]
        return lines + self._snapshot.describe(module)

    def _agree(self) -> None:
        what = "the model or the arguments of bagua.wrap"
        self.process_group.connections.agree(what, self._description)

    # The wrap: initial state, buckets, operations, start.

    def _claim_parameters(self) -> None:
        _claim(self)
        self._stepping: list[torch.nn.Parameter] = []  # whose optimizers step inside backward
        self._torchs_step_hooks = 0  # that were seen, of all modules
        self._take_steps_in_backward()

    def _build(self, *, gives_state: bool) -> None:
        """Give the ranks rank 0's state, then build tensors, buckets, operations and lanes."""
        self._stop()
        if gives_state:
            self._give_initial_state()
        self._make_buckets()
        self._built += 1
        self.traffic = MainThreadTraffic(self.process_group.connections)
        if not self.bagua_buckets:
            return
        self._running = self.bagua_algorithm.make_synchronizer(self)
        _log.info(
            "module '%s': %s, %s: %d tensors of %d bytes in %d bucket(s)",
            self.bagua_module_name,
            type(self.bagua_algorithm).__name__,
            self.process_group.connections.whereabouts(),
            sum(len(bucket.tensors) for bucket in self.bagua_buckets),
            sum(bucket.bytes() for bucket in self.bagua_buckets),
            len(self.bagua_buckets),
        )

    def _give_initial_state(self) -> None:
        if self._initial_state != "nothing":
            self.give_state(0, buffers=self._initial_state == "all")

    def give_state(self, source: int, buffers: bool) -> None:
        """Give every rank the parameters, optimizer state and perhaps buffers of ``source``.

        While ranks join a group at work, the ranks are the source, 0, and those that join.
        """
        tensors = self._snapshot.state(self.module)
        tensors += self._snapshot.buffers(self.module) if buffers else []
        connections = self.process_group.admission or self.process_group.connections
        broadcast_state(tensors, self.bagua_optimizers, connections, source)

    def _make_buckets(self) -> None:
        """Make new buckets; training continues with gradients that the user may hold."""
        gradients = [(p, p.grad) for _, p in self.bagua_build_params()]
        try:
            self._register_tensors()
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _register_tensors(self) -> None:
        """Register the algorithm's tensors, and give it buckets with operations."""
        algorithm = self.bagua_algorithm
        tensors = algorithm.init_tensors(self)
        limit = self._bucket_bytes
        groups = split_by_bucket_size(tensors, bagua_getter_closure, limit, is_sparse)
        self.bagua_buckets = algorithm.tensors_to_buckets(groups, self.gradient_as_bucket_view)
        for bucket in self.bagua_buckets:
            algorithm.init_operations(self, bucket)
        if self.guard is not None:
            self.guard.attach(self.bagua_buckets)

    def weights_sample(self) -> _C.WeightsSample | None:
        """The part of the weights that each round compares; None: nothing."""
        agree, every = self.bagua_algorithm.traits.ranks_agree, env.get_check_weights_every()
        if every is None:
            every = _CHECK_WEIGHTS_EVERY if agree else 0
        if self.process_group.size == 1 or agree is False or every == 0:
            return None
        return sample(self._snapshot.common_parameters(self.module), every)

    def _install_hooks(self, module: torch.nn.Module, *, on_forwards: bool) -> None:
        self._handles.append(module.register_state_dict_pre_hook(WeakHook(self._settle)))
        if on_forwards:
            self._handles += [
                # Before FSDP2 exchanges sharded parameters for whole ones.
                module.register_forward_pre_hook(
                    outside_graphs(self.before_forward), prepend=self._snapshot.sharded
                ),
                module.register_forward_hook(outside_graphs(self.after_forward)),
            ]
        if not self.bagua_algorithm.overrides("init_post_optimizer_step_hook"):
            return
        this = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            session = this()
            if session is None or only_makes_state() or part_of_a_step(optimizer):
                return
            session.bagua_algorithm.init_post_optimizer_step_hook(session)(optimizer)

        self._handles += [o.register_step_post_hook(after_step) for o in self.bagua_optimizers]

    def _watch_steps(self) -> MissingSteps | None:
        """Watch that the given optimizers step, where the algorithm depends on it."""
        if self.bagua_algorithm.traits.steps_on_gradients or not self.bagua_optimizers:
            return None
        from bagua._sync.communicating_optimizers import FirstSteps

        names = self.bagua_module_name, name_of(self.bagua_algorithm)
        for optimizer in self.bagua_optimizers:
            self._handles += FirstSteps(*names, optimizer, self.process_group).handles
        missing = MissingSteps(
            *names,
            self.bagua_optimizers,
            [p for _, p in self.bagua_build_params()],
        )
        self._handles += missing.handles
        return missing

    def _watch_kept_weights(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Watch the first steps for copies of the weights, where rounds give weights."""
        self._kept_weights = []
        if self.bagua_algorithm.traits.steps_on_gradients or self.process_group.size == 1:
            return []
        from bagua._sync.kept_weights import KeptWeights

        named, algorithm = self.bagua_build_params(), name_of(self.bagua_algorithm)
        self._kept_weights = [
            KeptWeights(self.bagua_module_name, algorithm, optimizer, named)
            for optimizer in self.bagua_optimizers
        ]
        return [handle for kept in self._kept_weights for handle in kept.handles]

    def _warn_of_nothing_to_train(self, module: torch.nn.Module) -> None:
        if self.bagua_build_params():
            return
        count = sum(1 for _ in module.parameters())
        warn(
            f"module '{self.bagua_module_name}': bagua.wrap has found nothing to train: its "
            f"{count} parameter(s) are frozen, experts or in _bagua_params_and_buffers_to_ignore, "
            "so nothing is communicated. Unfreeze parameters before the wrap, or wrap the module "
            "that has them."
        )

    # One step, in the order in which things happen.

    def bagua_samples(self, number: SupportsFloat) -> None:
        """See :meth:`BaguaModule.bagua_samples`."""
        if self.bagua_algorithm.traits.opens_at_forward:
            raise NotImplementedError(
                f"module '{self.bagua_module_name}': bagua_samples() weighs gradients and outer "
                f"rounds, and {type(self.bagua_algorithm).__name__} averages weights, in which all "
                "ranks count alike. Leave it out, or take another algorithm."
            )
        self.samples.add(number)

    @property
    def weight(self) -> float:
        """The factor of this rank's gradients in the last round: 1 unless ranks say samples."""
        return self._running.weight

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Prepare a forward: Note [Which backward communicates] in the C++ core.

        One in training mode opens its round here, one in ``eval()`` in its backward: a rank that
        evaluates alone, with gradients enabled, does not wait.
        """
        self._watching = False
        if self._running.in_backward:
            return  # recomputed for an activation checkpoint
        with_gradients = torch.is_grad_enabled()
        self.samples.forward_begins(with_gradients)
        syncs = with_gradients and self.require_backward_grad_sync
        communicates = syncs and self._snapshot.trains(module)
        inside = self.joining is not None
        now = module.training or inside or self.bagua_algorithm.traits.opens_at_forward
        if self._ended:
            return self._refuse_to_train_alone() if communicates else None
        if with_gradients and now:
            self._take_changes(module)
            self._run_pending()
        if communicates and now and self._missing_steps is not None:
            self._missing_steps.at_forward()
        if communicates and self.bagua_algorithm.need_reset():
            self._build(gives_state=self.bagua_algorithm.traits.reset_gives_state)
        if not self.bagua_buckets:
            return
        if with_gradients and (now or not syncs):
            self.bagua_train_step_counter += 1
        if with_gradients:
            self._running.begin_forward(communicates)
            self._take_steps_in_backward()
        opens = communicates and now and not (inside and self.synchronising)
        self._open_round(syncs=syncs, opens=opens)
        if opens:
            self.bagua_algorithm.init_forward_pre_hook(self)(inputs)
        self._watching = communicates

    def _refuse_to_train_alone(self) -> None:
        raise BaguaError(
            f"module '{self.bagua_module_name}': {self._ended}, so it would train without the "
            "other ranks. Wrap the module again, on every rank, after init_process_group()."
        )

    def _run_pending(self) -> None:
        if self.bagua_algorithm.mark_pending(self):
            self.wait_pending_comm_ops()

    def _open_round(self, *, syncs: bool, opens: bool) -> None:
        """``syncs``: the forward's backward would communicate; ``opens``: in a round from here."""
        first = opens and self._begin_round()
        due = self.buffers_due if self.joining is None else opens
        self.buffers_due = syncs
        gives = due and self._running.makes_rounds
        if gives:
            self._give_buffers()
        if first:
            self._compare()

    def _begin_round(self) -> bool:
        scale = 1.0
        if self._grad_scaler is not None and self.bagua_algorithm.traits.reads_grad_scale:
            scale = self._grad_scaler.get_scale()
        result_scale = 1.0 if self.joining is None else self.joining.result_scale
        return self._running.step_begins(scale, result_scale, self.samples.take())

    def _give_buffers(self) -> None:
        """Give every rank the buffers of one, as a part of the open round or the next."""
        buffers = self._snapshot.buffers(self.module) if self.broadcast_buffers else []
        if self.process_group.size == 1 or not buffers:
            return
        by_samples = self.samples.ever
        with self.traffic.counted("buffers"), self._running.part_of_the_round(by_samples):
            connections = self.process_group.connections
            source = 0 if self.joining is None else self.joining.buffers_source
            broadcast_tensors(buffers, connections, source)

    def _compare(self) -> None:
        if self.guard is not None:
            self.guard.begin_round(self._running, self.traffic)

    def after_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Have every backward through ``output`` communicate, if the forward does."""
        if self._watching:
            self._watching = False
            self._running.watch(tensors_in(output))

    def open_round_in_backward(self) -> None:
        """Open the round of a backward whose forward was in ``eval()`` or has had a backward."""
        if self.joining is not None or self.bagua_algorithm.traits.opens_at_forward:
            where = "Inside join()"
            if self.joining is None:
                where = f"With {type(self.bagua_algorithm).__name__}"
            raise BaguaError(
                f"module '{self.bagua_module_name}': a second backward through one forward, or "
                f"through a forward of an earlier step. {where} every forward has one "
                "backward: add the losses, or run the forward again."
            )
        self.bagua_train_step_counter += 1
        self._snapshot.check(self.module, self.bagua_module_name)
        if self._begin_round():
            self._compare()
        self.bagua_algorithm.init_forward_pre_hook(self)(())

    def before_inner_backward(self, loss: torch.Tensor) -> None:
        """Have a backward from ``loss`` inside the forward communicate, unless in ``no_sync()``.

        Without the call the outer forward decides, and algorithms that average weights do not
        notice such a backward. They begin another round here if an earlier backward has ended the
        forward's.
        """
        if not self._running.makes_rounds:
            return
        communicates = self.require_backward_grad_sync and self._snapshot.trains(self.module)
        if not self.bagua_algorithm.traits.opens_at_forward:
            self._running.begin_forward(communicates)
            return
        if self.synchronising:
            self._running.begin_forward(communicates)
        else:
            self.before_forward(self.module, ())
        if communicates:
            self._running.watch(tensors_in(loss))

    def _take_steps_in_backward(self) -> None:
        """Take over the steps of ``_apply_optimizer_in_backward``.

        torch's hooks, which would step on this rank's own gradients, are removed as in torch's DDP;
        :meth:`after_gradients` makes the steps.
        """
        torchs: Any = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
        hooks = torchs.param_to_optim_hook_handle_map if torchs is not None else {}
        if len(hooks) == self._torchs_step_hooks:
            return
        self._torchs_step_hooks = len(hooks)
        named = self.bagua_build_params()
        stepping = [(name, p) for name, p in named if hasattr(p, "_in_backward_optimizers")]
        if stepping and not self.bagua_algorithm.traits.steps_on_gradients:
            raise NotImplementedError(
                f"module '{self.bagua_module_name}': parameter '{stepping[0][0]}' has an optimizer "
                "of _apply_optimizer_in_backward, and "
                f"{type(self.bagua_algorithm).__name__} communicates around the optimizer's "
                "step(). Give bagua.wrap an optimizer whose step() is called after backward()."
            )
        self._stepping = [p for _, p in stepping]
        for parameter in self._stepping:
            for handle in hooks.get(parameter, []):
                handle.remove()

    def after_gradients(self) -> None:
        """Step with every communicated gradient that there is, and drop it."""
        for parameter in self._stepping:
            if parameter.grad is None:
                continue
            for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
            parameter.grad = None

    def mark_all_ready(self) -> None:
        self._running.mark_all()

    def wait_pending_comm_ops(self) -> None:
        """Block until the buckets that were launched are done; raise what failed on any rank."""
        self._running.wait()

    @property
    def _bagua_backend(self) -> Session:
        """Upstream's spelling: ``bagua_ddp._bagua_backend.wait_pending_comm_ops()``."""
        return self

    @property
    def synchronising(self) -> bool:
        return self._running.synchronising

    @property
    def communicates_in_backward(self) -> bool:
        return self._running.communicating

    # Rounds inside ``join()``: Note [Uneven inputs].

    def opens_round(self) -> bool:
        syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
        return syncs and not self.synchronising and self._snapshot.trains(self.module)

    def shadow_round(self, others: RanksWithInputs) -> None:
        """Answer a round of the ranks that still have inputs, with zero gradients."""
        self.joining = others
        if not self._running.makes_rounds:
            return
        self._running.begin_without_inputs(others.result_scale)
        self._give_buffers()
        self._compare()
        self._running.answer_with_zeros()

    # Changes while training goes on.

    def _take_changes(self, module: torch.nn.Module) -> None:
        """Check that the module is that of the wrap; take unfrozen parameters."""
        between = self._running.makes_rounds and not self.synchronising
        takes = between and self.bagua_algorithm.traits.takes_unfrozen
        if not self._snapshot.check(module, self.bagua_module_name, unfreezing=takes):
            return
        names = self._snapshot.unfrozen(module)
        self._snapshot.accept_unfrozen(module)
        if not names:
            return
        self._snapshot.refuse_unsupported(module, self.bagua_algorithm)
        self._running.agree_on_unfreezing(names)
        _release(self)
        self._claim_parameters()
        _log.info(
            "module '%s': new buckets, as unfrozen: %s", self.bagua_module_name, ", ".join(names)
        )
        self.rebuild()

    def admit_joining_ranks(self) -> None:
        """Take part in the wraps of ranks that join, before :meth:`rebuild`."""
        self._agree()
        if self.process_group.admission is not None:
            self._give_initial_state()

    def replace_algorithm(self, algorithm: AlgorithmImpl) -> None:
        self._snapshot.refuse_unsupported(self.module, algorithm)
        self.guard = self._guard_of(algorithm)
        self.bagua_algorithm = algorithm
        self.rebuild()

    def rebuild(self) -> None:
        """Build new buckets; weights and optimizer state stay as training has changed them."""
        self._build(gives_state=False)

    def hook_ids(self) -> list[int]:
        return [handle.id for handle in self._handles] + self._running.hook_ids()

    # Control.

    def stats(self) -> dict[str, Any]:
        running = self._running
        stats = statistics(running.stats(), running.communicators, self.traffic)
        connections = self.process_group.connections
        stats["network"] = {
            "round_trip_ms": connections.round_trip_us / 1000,
            "lanes": running.lanes,
            "congestion_control": connections.congestion_control,
        }
        stats |= {"built": self._built, **self.bagua_algorithm.statistics()}
        return stats if self.guard is None else stats | {"guard": self.guard.stats()}

    def pause(self) -> None:
        """End work between steps (asynchronous averaging). Every rank calls it."""
        self._running.end_together()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside it weights change only by what the caller does; what is due runs before."""
        self._run_pending()
        with self._running.exclusive():
            yield

    def _settle(self) -> None:
        self._running.settle()

    # The end.

    def announce_end(self) -> None:
        """:meth:`end_with_group` will follow because the program ends well."""
        if not self._ended:
            self.bagua_algorithm.announce_end()

    def close(self) -> None:
        """Remove all hooks and stop the threads. The module keeps its weights. Idempotent."""
        self._remove_hooks()
        self.end("it was closed")

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _undo(self) -> None:
        """Leave the module in the state before a construction that has failed."""
        self._remove_hooks()
        self._ended = "its wrap failed"
        self._stop()
        self.bagua_algorithm.close()
        _release(self)

    def end_with_group(self) -> None:
        """Stop the threads as the process group ends: later training forwards raise. Idempotent."""
        self.end("its process group was destroyed")

    def end(self, why: str) -> None:
        """Stop the threads; training forwards raise ``why`` as long as hooks are there."""
        if self._ended:
            return
        self._ended = why
        late_failure = self._finish_rounds()
        self._stop()
        self.bagua_algorithm.close()
        self._stepping = []
        _release(self)
        if late_failure is not None:
            raise late_failure

    def _finish_rounds(self) -> BaguaError | None:
        """Give the round that an earlier iteration has left some seconds to run.

        Returns a failure of the device at the last steps, which no step has raised.
        """
        if not self._running.makes_rounds:
            return None
        late_failure: BaguaError | None = None
        try:
            self._running.settle()
        except BaguaError as error:
            late_failure = error
        with suppress(BaguaError):  # this rank or another has failed, and raised that
            if self.bagua_algorithm.mark_pending(self):
                self._running.finish_soon()
        return late_failure

    def _stop(self) -> None:
        running, self._running = self._running, Synchronizer()
        running.close()


# A parameter belongs to one wrapped module, or to several that all copy their gradients and all
# send them by an algorithm that allows sharing (``shares_parameters``).
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _owners_of(parameter: torch.Tensor) -> list[weakref.ref[Session]]:
    owners: list[weakref.ref[Session]] = _owners.setdefault(parameter, [])
    owners[:] = [owner for owner in owners if owner() is not None]
    return owners


def _shares(session: Session) -> bool:
    return session.bagua_algorithm.traits.shares_parameters and not session.gradient_as_bucket_view


def _claim(session: Session) -> None:
    named = session.bagua_build_params()
    for name, parameter in named:
        for other in (reference() for reference in _owners_of(parameter)):
            if other is None or (_shares(session) and _shares(other)):
                continue
            raise RuntimeError(
                f"module '{session.bagua_module_name}': parameter '{name}' belongs to module "
                f"'{other.bagua_module_name}' too, which is wrapped already. Wrap one module that "
                "contains both; or wrap both with copied gradients, which share a parameter "
                "(bagua.wrap(do_flatten=False), or DistributedDataParallel by default), with "
                "gradient_allreduce or bytegrad."
            )
    for _, parameter in named:
        _owners_of(parameter).append(weakref.ref(session))


def _release(session: Session) -> None:
    for references in list(_owners.values()):
        references[:] = [r for r in references if r() not in (None, session)]


def is_owned(parameter: torch.Tensor) -> bool:
    return bool(_owners_of(parameter))
