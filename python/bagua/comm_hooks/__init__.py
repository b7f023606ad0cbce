"""Compressed gradients in torch's own ``DistributedDataParallel``: a communication hook in C++."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
import torch.distributed as dist

from bagua import _C
from bagua._core.group.connections import fingerprint
from bagua._core.group.job import as_bagua_group, ensure_initialised
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.group.warn import warn
from bagua._core.state.snapshot import guard_of, ignored_names, sparse_parameters
from bagua._ops.operations import Lane, make_ops
from bagua._sync.handle import LaneHandle
from bagua._sync.hooks import DroppedOnCopy, WeakHook, outside_graphs_lazily
from bagua._sync.samples import checked
from bagua.torch_api._session import is_owned
from bagua.torch_api.algorithms._error_feedback import ErrorFeedbackImpl
from bagua.torch_api.algorithms.base import (
    Algorithm,
    AlgorithmImpl,
    WarmUpImpl,
    as_algorithm,
)
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket

if TYPE_CHECKING:
    from bagua.comm_hooks._everywhere import everywhere as everywhere

__all__ = ["Handle", "everywhere", "register"]

_MARK = "_bagua_comm_hook"


def __getattr__(name: str) -> Any:
    if name == "everywhere":  # imported when it is used
        return import_module("bagua.comm_hooks._everywhere").everywhere
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


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
        self._rounds_before = 0  # of the training that a loaded state is of
        scaled = grad_scaler is not None and algorithm.traits.reads_grad_scale
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
            outcome=algorithm.outcome,
        )

    def bagua_samples(self, number: SupportsFloat) -> None:
        """Say how many samples, or tokens, this rank's next training forward is of.

        As ``bagua_samples`` of a wrapped module: call it before each training forward, not before
        those of an evaluation; numbers of forwards inside ``ddp.no_sync()`` add up.

        Raises:
            ValueError: a number that is not finite, or negative.
        """
        self._hook.add_samples(checked(number))

    def attach(self, ddp: torch.nn.parallel.DistributedDataParallel) -> None:
        """Make this the hook of torch's ``Reducer``, and have waits in forwards told."""
        self._hook.register(ddp.reducer)
        ddp.register_forward_pre_hook(_RefusesLateParameters(ddp))
        ddp.register_forward_pre_hook(WeakHook(self._forward_begins))
        ddp.module.register_forward_pre_hook(WeakHook(self._module_begins), prepend=True)

    @outside_graphs_lazily
    def _forward_begins(self) -> None:
        self._running.waits_outside("DistributedDataParallel's own collectives in its forward")

    @outside_graphs_lazily
    def _module_begins(self) -> None:
        self._running.waits_outside("")

    def _operations(self, torchs: _C.GradientBucket, round: int) -> _C.BucketOperations:
        """Called by autograd's thread for a bucket that is new."""
        bucket, algorithm = HookedBucket(torchs, self._names), self._algorithm
        self._count(round - 1)
        pages = algorithm.append_operations(bucket)
        if isinstance(algorithm, WarmUpImpl) and not algorithm.warmed_up:
            self._hook.renew(algorithm.warmup_steps - self._rounds_before + 1)
        memory = pages[0].memory if pages else None
        ops, scale = make_ops(self._lane, bucket)
        return _C.BucketOperations(bucket.name, bucket.describe(), ops, scale, memory)

    def _count(self, rounds: int) -> None:
        """Have an algorithm with a warm-up know of ``rounds``, and those before a load."""
        if isinstance(self._algorithm, WarmUpImpl):
            self._ledger.counters[self._algorithm.counter] = self._rounds_before + rounds

    def _settle(self) -> None:
        self._hook.settle()
        self._count(self._hook.round)

    def _restore(self, state: Mapping[str, Any]) -> None:
        algorithm = self._algorithm
        if not isinstance(algorithm, ErrorFeedbackImpl):
            return super()._restore(state)
        # The memory of this page is not a member of the rounds to come.
        page = algorithm.compression(self._all_parameters(), _C.RoundOutcome()).page
        assert page is not None
        algorithm.ledger.restore(state, [page])
        self._rounds_before = algorithm.ledger.counters["rounds"] - self._hook.round
        self._hook.renew(self._hook.round + 1)

    def _all_parameters(self) -> HookedBucket:
        tensors, offsets, numel = [], [], 0
        for size, stride, dtype in self._named.values():
            tensors.append(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
            offsets.append(numel)
            numel += size.numel()
        dtypes = (dtype for _, _, dtype in self._named.values())
        widest = functools.reduce(torch.promote_types, dtypes, torch.float16)
        buffer = torch.empty(numel, dtype=widest, device="meta")
        names = {id(tensor): name for tensor, name in zip(tensors, self._named, strict=True)}
        return HookedBucket(_C.GradientBucket(0, buffer, tensors, offsets), names, "every")


class _RefusesLateParameters(DroppedOnCopy):
    """Raises before a forward whose gradients torch would not average: Note [Plan guard]."""

    def __init__(self, ddp: torch.nn.parallel.DistributedDataParallel) -> None:
        self._look(ddp)

    def _look(self, ddp: torch.nn.parallel.DistributedDataParallel) -> None:
        _refuse_unaveraged(ddp)
        self._guard, self._dicts = guard_of(ddp.module)

    def __call__(self, ddp: torch.nn.parallel.DistributedDataParallel, *_: Any) -> None:
        if torch.is_grad_enabled() and ddp.require_backward_grad_sync:
            self._check(ddp)

    @outside_graphs_lazily
    def _check(self, ddp: torch.nn.parallel.DistributedDataParallel) -> None:
        if self._guard.difference(self._dicts):
            self._look(ddp)


def _refuse_unaveraged(ddp: torch.nn.parallel.DistributedDataParallel) -> None:
    """Raise where a trained parameter is none of those that torch's ``Reducer`` was made with."""
    ignored = ignored_names(ddp.module) | getattr(ddp, "parameters_to_ignore", set())
    for name, parameter in ddp.module.named_parameters():
        if not parameter.requires_grad or name in ignored or getattr(parameter, "expert", False):
            continue
        if not _C.has_torch_reducer(parameter):
            raise _C.BaguaError(
                f"module '{type(ddp.module).__name__}': parameter '{name}' was added, unfrozen or "
                "cast since DistributedDataParallel was constructed, which does not average its "
                "gradients. Construct DistributedDataParallel again after such a change, on every "
                "rank, with its communication hook, or freeze the parameter"
            )


class HookedBucket(BaguaBucket):
    """Gradients of some parameters in memory that belongs to torch.

    ``names``: of the parameters, by ``id``. ``name``: of the bucket; by default its index.
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


class _Mark:
    """In the ``__dict__`` of a ``DistributedDataParallel`` that has a hook."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        warn(
            "a copy of a DistributedDataParallel has no communication hook: its gradients are not "
            "compressed. Call bagua.comm_hooks.register on the copy, on every rank, if it is to "
            "be trained.",
            RuntimeWarning,
        )

    def __reduce__(self) -> Any:
        return type(None), ()  # files load where this package is not installed


def register(
    ddp: torch.nn.parallel.DistributedDataParallel,
    algorithm: str | Algorithm,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Handle:
    """Have ``algorithm`` reduce the gradients of torch's own ``DistributedDataParallel``.

    Every rank of ``ddp``'s process group calls it, once, before or between steps. Initialises bagua
    over ``torch.distributed`` if that has not been done.

    Args:
        ddp: with parameters on one device, without another hook.
        algorithm: one that reduces gradients: ``"bytegrad"``, ``"gradient_allreduce"``,
            ``"power_sgd"``, ``"sparse"``, or an object such as ``PowerSGDAlgorithm(rank=4)``.
        grad_scaler: the scaler that the loss is multiplied with, if there is one. Algorithms with
            error feedback need it.

    Returns:
        Statistics and state of the hook. It need not be kept.

    Raises:
        TypeError: ``ddp`` or ``algorithm`` is something else.
        ValueError: parameters on several devices, or an unknown name of an algorithm.
        NotImplementedError: the algorithm does not reduce gradients, or cannot reduce these.
        RuntimeError: ``ddp`` has a hook, or its module is wrapped by ``bagua.wrap``.
        BaguaMismatchError: the ranks' models or arguments differ.
        BaguaError: a rank did not come, or was lost.

    Example::

        ddp = torch.nn.parallel.DistributedDataParallel(model)
        hook = register(ddp, "bytegrad")
        loss_function(ddp(inputs), targets).backward()
        hook.stats()["total"]["bytes_sent"]
    """
    _check_ddp(ddp)
    algorithm = as_algorithm("comm_hooks.register", algorithm)
    ensure_initialised()
    # Among bagua's own groups the default one has the timeout that the user has asked for.
    everyone = ddp.process_group is dist.group.WORLD
    group = as_bagua_group(None if everyone else ddp.process_group)
    impl = _reified(algorithm, group)
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    named = [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    device = _check_parameters(ddp, named, impl)
    module_name = type(ddp.module).__name__
    scaled = grad_scaler is not None and grad_scaler.is_enabled()
    description = [f"{algorithm.describe()} grad_scaler={scaled}"]
    description += [f"{name}: {tuple(p.shape)} {p.dtype}" for name, p in named]
    connections = group.connections
    with connections.collective_phase(f"registering a communication hook of '{module_name}'"):
        connections.agree("the model or the arguments of comm_hooks.register", description)
        wrap = connections.next_wrap()
        exact = isinstance(impl, GradientAllReduceAlgorithmImpl)
        lane = Lane(f"{wrap}/lane0", device, group, sums_of_torch=exact)
        lane = _connected(lane, impl)
        handle = Handle(module_name, impl, lane, named, grad_scaler if scaled else None, wrap)
        # A rank must not go on while another is still connecting to it.
        connections.reduce_numbers("registering a communication hook", _C.ReduceOp.SUM, 0)
    try:
        handle.attach(ddp)
    except BaseException:
        handle.close()  # torch has a hook already
        raise
    setattr(ddp, _MARK, _Mark(handle))
    logger: Any = getattr(ddp, "logger", None)
    with contextlib.suppress(AttributeError, TypeError):  # torch's own, for its logging only
        logger._set_comm_hook_name(f"bagua.{type(algorithm).__name__}")
    return handle


def is_hook(algorithm: str | Algorithm) -> bool:
    """Whether a communication hook can do all that ``algorithm`` does. Every rank calls it."""
    ensure_initialised()
    try:
        _reified(as_algorithm("comm_hooks.register", algorithm), as_bagua_group(None))
    except NotImplementedError:
        return False
    return True


def _check_ddp(ddp: Any) -> None:
    if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel) or not hasattr(
        ddp, "reducer"
    ):
        raise TypeError(
            "comm_hooks.register takes a torch.nn.parallel.DistributedDataParallel of torch's own, "
            f"not {type(ddp).__module__}.{type(ddp).__qualname__}; bagua's wrappers take "
            "algorithm= themselves"
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise RuntimeError(
            "comm_hooks.register: this DistributedDataParallel was made with "
            "torch._dynamo.config.optimize_ddp = 'python_reducer', which never calls the hook; set "
            "it to True before DistributedDataParallel is constructed"
        )
    if getattr(ddp, _MARK, None) is not None or getattr(ddp, "_comm_hooks", None):
        raise RuntimeError(
            "comm_hooks.register: this DistributedDataParallel has a communication hook already "
            "(register_comm_hook, mixed_precision= and fused optimizers make one), and torch "
            "allows one only; construct it again"
        )


def _reified(algorithm: Algorithm, group: BaguaProcessGroup) -> AlgorithmImpl:
    impl = algorithm.reify(group)
    alone = impl.overrides("operations") and not impl.overrides("init_operations")
    if not (alone and impl.traits.steps_on_gradients and impl.traits.ranks_agree):
        raise NotImplementedError(
            f"comm_hooks.register: {type(algorithm).__name__} does more than reduce the gradients "
            "of one bucket, which is all that a communication hook can do; take "
            "'gradient_allreduce', 'bytegrad', 'power_sgd' or 'sparse'. In a script that "
            "constructs DistributedDataParallel by itself, bagua.wrap(module, optimizers, "
            "algorithm) in its place takes every algorithm"
        )
    if exact := getattr(impl, "exact", ()):
        raise NotImplementedError(
            f"comm_hooks.register: {type(algorithm).__name__} has exact_parameters={exact}, "
            "but torch decides which parameters share a bucket: leave them out"
        )
    return impl


def _check_parameters(
    ddp: torch.nn.parallel.DistributedDataParallel,
    named: list[tuple[str, torch.nn.Parameter]],
    impl: AlgorithmImpl,
) -> torch.device:
    sparse = sparse_parameters(ddp.module)
    for name, parameter in named:
        if is_owned(parameter):
            raise RuntimeError(
                f"comm_hooks.register: parameter '{name}' belongs to a module that bagua.wrap has "
                "wrapped, which communicates already; use one of the two"
            )
        if id(parameter) in sparse:
            raise NotImplementedError(
                f"comm_hooks.register: parameter '{name}' has sparse gradients, which a "
                "communication hook cannot take; pass sparse=False to the embedding"
            )
        if parameter.is_complex() and not impl.traits.complex_parameters:
            raise NotImplementedError(
                f"comm_hooks.register: parameter '{name}' is complex, which "
                f"{type(impl).__name__} cannot communicate; use gradient_allreduce"
            )
        if parameter.device != named[0][1].device:
            raise ValueError(
                f"comm_hooks.register: parameter '{name}' is on {parameter.device}, "
                f"'{named[0][0]}' on {named[0][1].device}; all must be on one device"
            )
    return named[0][1].device


def _connected(lane: Lane, impl: AlgorithmImpl) -> Lane:
    """``lane`` with all communicators that the operations will need: no backward connects."""
    hierarchical = getattr(impl, "hierarchical", False)
    if not hierarchical or isinstance(impl, WarmUpImpl):
        lane.communicator(None)
    if hierarchical == "sharded":
        lane.shares(None)
    elif hierarchical:
        lane.nodes(None)
    return lane
