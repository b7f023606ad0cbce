"""Algorithms: which tensors are communicated, in which buckets, how and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from bagua import _C
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.state.bagua_tensor import record_of
from bagua._core.state.ledger import Ledger, Page
from bagua._core.state.shards import is_sharded
from bagua._core.state.snapshot import sparse_parameters
from bagua._ops.operations import Operation
from bagua._sync.averaging_synchronizer import AveragingSynchronizer
from bagua._sync.engine import EngineSynchronizer
from bagua._sync.synchronizer import Synchronizer
from bagua.torch_api.bucket import BaguaBucket, bucket_of
from bagua.torch_api.guard import Guard

if TYPE_CHECKING:
    from bagua.torch_api._session import Session

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "Traits",
    "WarmUpImpl",
    "as_algorithm",
    "as_optimizers",
    "check_arguments",
    "checked_names",
    "name_of",
    "refuse_shards",
]

#: Registered tensors, grouped by dtype, device and bucket size.
Groups: TypeAlias = Sequence[Sequence[torch.Tensor]]
#: Called after ``step()`` of an optimizer.
StepHook: TypeAlias = Callable[[torch.optim.Optimizer], None]


class Algorithm:
    """The arguments of a distributed algorithm; :meth:`reify` makes the working object."""

    def reify(self, process_group: BaguaProcessGroup) -> AlgorithmImpl:
        """The implementation on ``process_group``."""
        raise NotImplementedError(f"{type(self).__name__} does not implement reify")

    def within(self, process_group: BaguaProcessGroup) -> BaguaProcessGroup:
        """The group that this rank communicates in, where it is another one than was given."""
        return process_group

    def describe(self) -> str:
        """The class and its plain arguments: equal on all ranks."""
        kinds = (bool, int, float, str, tuple, type(None))
        plain = {key: value for key, value in vars(self).items() if isinstance(value, kinds)}
        return f"{type(self).__name__} {plain}"

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """Construct an algorithm by its registered name.

        Raises:
            KeyError: unknown name; lists the registered ones.
        """
        algorithm: Algorithm = GlobalAlgorithmRegistry.get(name)(**kwargs)
        return algorithm


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of an algorithm at work, equal on all ranks.

    Attributes:
        ranks_agree: whether all ranks hold the same weights after every step, which is checked;
            None: not known, and checked where ``BAGUA_CHECK_WEIGHTS_EVERY`` is set.
        steps_on_gradients: whether optimizers step on communicated gradients, so that they may do
            so inside backward (``_apply_optimizer_in_backward``), or communicate by themselves
            (``ZeroRedundancyOptimizer``).
        opens_at_forward: whether weights are communicated, which must hold still from forward to
            backward: the round of a forward in ``eval()`` begins there, as in ``train()``, and the
            algorithm marks the tensors itself. False: the round begins in the backward, at whose
            end tensors that are not gradients are marked.
        remembers_gradients: whether it keeps values made of gradients for later rounds, which are
            right under a loss scale only if the wrap was given the scaler.
        reads_grad_scale: whether its operations ask for the loss scale (``grad_scaler=`` of the
            wrap), which costs a wait for the device in every step.
        takes_uneven_inputs: whether a rank without further inputs can take part in rounds by
            sending zeros (``join()``).
        takes_unfrozen: whether parameters that were frozen at the wrap may be unfrozen: buckets are
            rebuilt without a broadcast.
        shares_parameters: whether a parameter may belong to a second wrapped module.
        complex_parameters: whether complex parameters can be communicated.
        sparse_gradients: whether gradients of sparse layout can be, those of
            ``torch.nn.Embedding(sparse=True)``.
        takes_shards: whether parameters may be DTensors, of which each rank communicates its shard
            with the ranks that hold the same shard.
        needs_flat_buckets: whether tensors must be views of their bucket.
        broadcast_buffers: whether training forwards give every rank the first rank's buffers,
            unless ``bagua.wrap(broadcast_buffers=...)`` says otherwise.
        reset_gives_state: whether the first rank's state is given to all ranks where
            :meth:`AlgorithmImpl.need_reset` has buckets rebuilt.
        default_guard: the guard where ``bagua.wrap`` is given none; None: no guard.
        refuses_guard: why a guard has nothing to watch, and what to do; empty: it may be guarded.
    """

    ranks_agree: bool | None = None
    steps_on_gradients: bool = True
    opens_at_forward: bool = False
    remembers_gradients: bool = False
    reads_grad_scale: bool = True
    takes_uneven_inputs: bool = False
    takes_unfrozen: bool = False
    shares_parameters: bool = False
    complex_parameters: bool = False
    sparse_gradients: bool = False
    takes_shards: bool = False
    needs_flat_buckets: bool = False
    broadcast_buffers: bool = True
    reset_gives_state: bool = True
    default_guard: Guard | None = None
    refuses_guard: str = ""


class AlgorithmImpl:
    """An algorithm at work. Subclasses override the methods they need.

    The hook factories ``init_*_hook`` are called at every firing, so that a factory can decide
    per step. Methods that are not overridden cost nothing: their work is done in C++.

    Attributes:
        traits: what it is like; a class or an instance has its own.
        ledger: its state for checkpoints.
        mean_buffers: names of buffers that have a mean over the ranks; None: those of norms.
        outcome: of the operations' memories, which change together; None: there are none.
    """

    traits = Traits()
    mean_buffers: Sequence[str] | None = None
    outcome: _C.RoundOutcome | None = None

    def __init__(self, process_group: BaguaProcessGroup) -> None:
        self.process_group = process_group
        self.ledger = Ledger(type(self).__name__, lambda: process_group.connections, pages=False)

    def need_reset(self) -> bool:
        """Whether tensors and buckets must be rebuilt; asked in every training forward."""
        return False

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        """Register the tensors to communicate: by default all gradients, last parameter first."""
        tensors = []
        sparse = sparse_parameters(bagua_ddp.module)
        for name, parameter in reversed(bagua_ddp.bagua_build_params()):
            if id(parameter) not in sparse:
                parameter.bagua_ensure_grad()  # type: ignore[attr-defined]
            tensors.append(
                parameter.ensure_bagua_tensor(  # type: ignore[attr-defined]
                    name,
                    bagua_ddp.bagua_module_name,
                    getter_closure=_gradient,
                    setter_closure=_set_gradient,
                )
            )
            if id(parameter) in sparse:
                record_of(parameter).sparse = _C.SparseGradient()
        return tensors

    def tensors_to_buckets(self, tensors: Groups, do_flatten: bool) -> list[BaguaBucket]:
        """Make the buckets, from tensors grouped by dtype, device and bucket size."""
        return [bucket_of(group, str(i), flatten=do_flatten) for i, group in enumerate(tensors)]

    def operations(self, bucket: BaguaBucket) -> list[Operation]:
        """The operations of ``bucket``, which run when its tensors are ready.

        An algorithm of which this is all can be a communication hook: ``comm_hooks.register``.
        """
        return []

    def init_operations(self, bagua_ddp: Session, bucket: BaguaBucket) -> None:
        """Append what ``bucket`` does when its tensors are ready: by default :meth:`operations`."""
        self.append_operations(bucket)

    def append_operations(self, bucket: BaguaBucket) -> list[Page]:
        """Append :meth:`operations`, and continue in their state, which is returned."""
        if operations := self.operations(bucket):
            bucket.clear_ops()
        for operation in operations:
            bucket.append_operation(operation)
        pages = [operation.page for operation in operations if operation.page is not None]
        self.ledger.take(*pages)
        return pages

    def make_synchronizer(self, bagua_ddp: Session) -> Synchronizer:
        """Make what runs the buckets: an engine, or a thread that averages weights periodically."""
        if any(bucket.asynchronous is not None for bucket in bagua_ddp.bagua_buckets):
            return AveragingSynchronizer(bagua_ddp)
        return EngineSynchronizer(bagua_ddp)

    def init_forward_pre_hook(self, bagua_ddp: Session) -> Callable[[Any], None]:
        """Called with the input of every training forward."""
        return _nothing

    def init_backward_hook(self, bagua_ddp: Session) -> Callable[[str, torch.nn.Parameter], None]:
        """Called when a gradient is there. Overriding it takes the step off the C++ path."""

        def mark_ready(parameter_name: str, parameter: torch.nn.Parameter) -> None:
            parameter.bagua_mark_communication_ready()  # type: ignore[attr-defined]

        return mark_ready

    def init_pre_backward_hook(self, bagua_ddp: Session) -> Callable[[], None]:
        """Called when a backward that will communicate begins, before it has made a gradient.

        What it raises ends the backward. Not called for ``torch.autograd.grad`` and
        ``backward(inputs=...)``, nor where the module's output holds no tensors.
        """
        return _nothing

    def init_post_backward_hook(self, bagua_ddp: Session) -> Callable[[], None]:
        """Called at the end of backward: by default wait for communication."""
        return bagua_ddp.wait_pending_comm_ops

    def init_post_optimizer_step_hook(self, bagua_ddp: Session) -> StepHook:
        """Called after ``step()`` of every optimizer given to ``bagua.wrap``."""
        return _nothing

    def overrides(self, method: str) -> bool:
        """Whether the algorithm has its own ``method``."""
        return getattr(type(self), method) is not getattr(AlgorithmImpl, method)

    def statistics(self) -> dict[str, Any]:
        """Further entries of ``bagua_stats()``; by default none."""
        return {}

    def announce_end(self) -> None:
        """Called when the program ends well: warn of what is lost."""

    def close(self) -> None:
        """Called when the module is wrapped again or closed: undo changes outside of it."""

    def mark_pending(self, bagua_ddp: Session) -> bool:
        """Mark tensors that an earlier iteration left to communicate; False if there are none.

        Called before a training forward begins anything, inside ``no_sync()`` too, before weights
        are read for a checkpoint or an average, and when the module is closed; the caller waits
        for the communication.
        """
        return False

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """A context in which the weights are those that the ranks share, to evaluate or to save.

        By default they are as training has left them.
        """
        yield

    def sync(self) -> None:
        """End local training for now: afterwards the weights are the anchor. All ranks call it.

        By default nothing is done.
        """

    def state_dict(self) -> dict[str, Any]:
        """State of the algorithm between steps, for a checkpoint.

        Tensors and counters by name of parameter and kind; what differs between ranks is under
        ``rank<r>/``, so that ``torch.distributed.checkpoint`` keeps every rank's. Call it between
        two iterations. By default nothing is remembered.
        """
        self.update_ledger()
        return self.ledger.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`: on every rank, after ``bagua.wrap``.

        Raises:
            ValueError: the state is of another algorithm; names what does not fit, and nothing has
                changed then.
        """
        self.update_ledger()
        self.ledger.restore(state)
        self.ledger_loaded()

    def update_ledger(self) -> None:
        """Called before the ledger is saved or loaded: bring it up to date."""

    def ledger_loaded(self) -> None:
        """Called when the ledger has got a state: continue from it."""


class WarmUpImpl(AlgorithmImpl):
    """Averages gradients exactly in the first rounds; then subclasses communicate in their way.

    A round is a forward and a backward outside ``no_sync()``. Subclasses set a :attr:`ledger` with
    a ``counter`` of them. ``warming_up``: the buckets are those of the warm-up.
    """

    counter = "warmed_up"

    def __init__(self, process_group: BaguaProcessGroup, warmup_steps: int) -> None:
        super().__init__(process_group)
        self.warmup_steps = warmup_steps
        self.warming_up = True

    @property
    def warmed_up(self) -> bool:
        return self.ledger.counters[self.counter] >= self.warmup_steps

    def need_reset(self) -> bool:
        return self.warming_up == self.warmed_up

    def init_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        if self.warmup_steps:
            refuse_shards(bagua_ddp, "warmup_steps")
        self.warming_up = not self.warmed_up
        return self.later_tensors(bagua_ddp) if self.warmed_up else super().init_tensors(bagua_ddp)

    def later_tensors(self, bagua_ddp: Session) -> list[torch.Tensor]:
        """Register the tensors to communicate after the warm-up: by default gradients."""
        return super().init_tensors(bagua_ddp)

    def operations(self, bucket: BaguaBucket) -> list[Operation]:
        if not self.warmed_up:
            return [bucket.sum_or_mean(group=self.process_group)]
        return self.later_operations(bucket)

    def later_operations(self, bucket: BaguaBucket) -> list[Operation]:
        """The operations of ``bucket`` after the warm-up."""
        return []

    def init_post_backward_hook(self, bagua_ddp: Session) -> Callable[[], None]:
        def finish() -> None:
            bagua_ddp.wait_pending_comm_ops()
            self.ledger.counters[self.counter] += 1

        return finish


def name_of(algorithm: AlgorithmImpl) -> str:
    return type(algorithm).__name__.removesuffix("Impl")


def refuse_shards(session: Session, argument: str, unless: str = "") -> None:
    """Raise ValueError where a parameter is a DTensor, with which ``argument`` cannot be given.

    ``unless``: how it can.
    """
    remedy = f"leave {argument}= out" + (f", or give it {unless}" if unless else "")
    for name, parameter in session.bagua_build_params():
        if is_sharded(parameter):
            raise ValueError(
                f"module '{session.bagua_module_name}': parameter '{name}' is a DTensor, of which "
                f"{name_of(session.bagua_algorithm)} sends weights only, between a fixed number of "
                f"ranks: {remedy}"
            )


def checked_names(mean_buffers: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(mean_buffers, str) or not all(isinstance(n, str) for n in mean_buffers or ()):
        raise TypeError(f"mean_buffers is a list of names of buffers, not {mean_buffers!r}")
    return None if mean_buffers is None else tuple(mean_buffers)


def as_algorithm(
    caller: str, given: Any, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> Algorithm:
    """The algorithm that a user gives as an object or by its name.

    ``optimizers``: those given beside it; one whose class needs an argument takes them.

    Raises ValueError, naming ``caller``, for an unknown name, and TypeError for anything else.
    """
    if isinstance(given, Algorithm):
        return given
    if not isinstance(given, str):
        raise TypeError(
            f"{caller}: algorithm must be a name or an instance of "
            f"bagua.torch_api.algorithms.Algorithm, such as ByteGradAlgorithm(), not {given!r}"
        )
    try:
        algorithm = GlobalAlgorithmRegistry.get(given)
    except KeyError as error:
        raise ValueError(f"{caller}: {error.args[0]}") from None
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    arguments = signature(algorithm).parameters.values()
    needs = [p for p in arguments if p.default is p.empty and p.kind not in variadic]
    if len(needs) != len(optimizers) and needs:
        names = ", ".join(parameter.name for parameter in needs)
        raise TypeError(f"{caller}: '{given}' needs {names}: pass {algorithm.__name__}({names})")
    made: Algorithm = algorithm(*(optimizers if needs else ()))
    return made


def as_optimizers(caller: str, given: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that a user gives as one or as several; TypeError for anything else."""
    if isinstance(given, torch.optim.Optimizer):
        return [given]
    if isinstance(given, (str, Algorithm)):
        raise TypeError(
            f"{caller}: {given!r} stands in the place of the optimizers; pass it as algorithm="
        )
    optimizers = list(given)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{caller}: {type(optimizer).__name__} is not a torch.optim.Optimizer")
    return optimizers


def check_arguments(caller: str, grad_scaler: Any, guard: Any) -> None:
    """Raise TypeError, naming ``caller``, unless each is what its name says."""
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise TypeError(
            f"{caller}: grad_scaler must be None or a torch.amp.GradScaler, not "
            f"{type(grad_scaler).__name__}"
        )
    if guard is not None and not isinstance(guard, Guard):
        raise TypeError(f"{caller}: guard is a bagua.torch_api.Guard or None, not {guard!r}")


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = gradient


def _nothing(*_: Any) -> None:
    return None


class _Registry(dict[str, dict[str, Any]]):
    def register(
        self, name: str, algorithm: type[Algorithm], description: str | None = None
    ) -> None:
        """Add an algorithm under a name that is not taken."""
        if not isinstance(name, str):
            raise TypeError(f"algorithm name must be a str, not {type(name).__name__}")
        if name in self:
            raise ValueError(f"algorithm '{name}' is registered already")
        self[name] = {"algorithm": algorithm, "description": description}

    def get(self, name: str, default: Any = None) -> Any:
        """The class registered as ``name``; KeyError lists the registered ones."""
        if name not in self:
            raise KeyError(
                f"unknown algorithm '{name}'; registered: {', '.join(self.available_algorithms())}"
            )
        return self[name]["algorithm"]

    def available_algorithms(self) -> list[str]:
        return list(self)

    def __str__(self) -> str:
        return f"Registered algorithms: {', '.join(self)}"


GlobalAlgorithmRegistry = _Registry()
