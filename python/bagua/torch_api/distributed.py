"""``bagua.wrap``, and ``BaguaModule``: methods of a wrapped module.

A wrapped module's class becomes a subclass of its own class and of :class:`BaguaModule`. Copies and
pickles of it are of the original class, without communication: the copy of ``copy.deepcopy`` or
``torch.save`` is an ordinary module, which may be wrapped again, and which says so once if it
is trained without that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist

from bagua._core.group.job import as_bagua_group, ensure_initialised
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.group.warn import warn
from bagua._sync.hooks import DroppedOnCopy
from bagua._watch.per_round import summary
from bagua.torch_api._session import Session, is_owned
from bagua.torch_api.algorithms.auto import AutoAlgorithm
from bagua.torch_api.algorithms.base import (
    Algorithm,
    AlgorithmImpl,
    as_algorithm,
    as_optimizers,
    check_arguments,
)
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.guard import Guard

__all__ = [
    "BaguaDistributedDataParallel",
    "BaguaModule",
    "forget_copy",
    "plain_twin",
    "watch_copy",
    "wrap",
]

#: Bagua's name of the class.
BaguaDistributedDataParallel = Session

_HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_state_dict_pre_hooks",
    "_forward_hooks_always_called",
)


#: In the ``__dict__`` of modules that do not communicate yet: what forwards are to do.
_SYNCHRONISES = "require_backward_grad_sync"


def wrap(
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    algorithm: Algorithm | str | None = None,
    process_group: Any = None,
    do_flatten: bool | None = True,
    *,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    guard: Guard | None = None,
) -> BaguaModule:
    """Train ``model`` data-parallel; ``model.with_bagua(...)`` is the same.

    Every rank of the group calls it, with the same model and arguments. Parameters, buffers and
    optimizer state of the group's first rank are given to all. Calling it again switches to another
    algorithm.

    Args:
        model: any module; stays the same object.
        optimizers: the optimizer used for the module, or several; their state is given to all
            ranks. Algorithms that communicate at their steps, such as ``diloco``, need them.
        algorithm: how and when ranks communicate (``bagua.torch_api.algorithms``), or its name,
            such as ``"bytegrad"``. None: ``AutoAlgorithm()``, which measures its candidates and
            keeps the fastest.
        process_group: who communicates: None for all ranks, a torch process group, a ``DeviceMesh``
            of one dimension, or a ``BaguaProcessGroup``.
        do_flatten: make gradients views of their buckets; False copies them in and out. None: views
            only where the algorithm needs them.
        find_unused_parameters: ranks exchange which parameters were used, and one that no rank
            used keeps its ``.grad``. Unused parameters never hang, with or without it.
        broadcast_buffers: give every rank the first rank's buffers before a training forward.
            None: as the algorithm has it.
        grad_scaler: the ``GradScaler`` of the loss. Algorithms with momentum or residuals need it
            to keep them unscaled: if you use one and do not pass it, they are silently wrong.
        guard: optional accuracy monitor, which warns if the algorithm loses too much. None: that of
            the algorithm, off for most.

    Returns:
        ``model`` itself, now a :class:`BaguaModule`.

    Raises:
        RuntimeError: before ``init_process_group``, of bagua or of torch.distributed.
        BaguaMismatchError: the ranks' models or arguments differ; names the first difference.
        BaguaError: a rank did not come, or was lost; says where the others are.
        TypeError, ValueError, NotImplementedError: bad arguments or parameters, by name.

    Note:
        To ignore parameters or buffers, assign the list of their names (as in ``state_dict()``) to
        ``module._bagua_params_and_buffers_to_ignore`` before the call.

    Example::

        model = bagua.wrap(model, [optimizer], ByteGradAlgorithm())
        loss_function(model(inputs), targets).backward()
        optimizer.step()
    """
    optimizers = as_optimizers("bagua.wrap", optimizers)
    algorithm = AutoAlgorithm() if algorithm is None else algorithm
    algorithm = as_algorithm("bagua.wrap", algorithm, optimizers)
    check_arguments("bagua.wrap", grad_scaler, guard)
    if dist.is_initialized():
        ensure_initialised()
    group = as_bagua_group(process_group)
    wrapped_class = _class_of(model)
    with group.connections.collective_phase("bagua.wrap"):
        ddp = Session(
            model,
            optimizers,
            algorithm,
            group,
            getattr(model, "_bagua_module_name", None),
            gradient_as_bucket_view=do_flatten,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            grad_scaler=grad_scaler,
            guard=guard,
            replaces=model.bagua_ddp if isinstance(model, BaguaModule) else None,
        )
    forget_copy(model)
    model.__class__ = wrapped_class
    assert isinstance(model, BaguaModule)
    model._attach(ddp)
    return model


class BaguaModule(torch.nn.Module):
    """A ``torch.nn.Module`` after ``bagua.wrap``."""

    _bagua_original: type[torch.nn.Module]

    @property
    def bagua_ddp(self) -> Session:
        """The wrapper that communicates for this module."""
        ddp: Session = self.__dict__["_bagua_ddp"]
        return ddp

    @property
    def bagua_module_name(self) -> str:
        """Name of the module in messages and stores."""
        return self.bagua_ddp.bagua_module_name

    @property
    def bagua_algorithm(self) -> AlgorithmImpl:
        """The algorithm at work."""
        return self.bagua_ddp.bagua_algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers given to ``bagua.wrap``."""
        return self.bagua_ddp.bagua_optimizers

    @property
    def bagua_buckets(self) -> list[BaguaBucket]:
        """All buckets, in launch order."""
        return self.bagua_ddp.bagua_buckets

    @property
    def bagua_train_step_counter(self) -> int:
        """Number of forwards in training mode with gradients enabled."""
        return self.bagua_ddp.bagua_train_step_counter

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of parameters and buffers that are left alone."""
        return self.bagua_ddp.parameters_to_ignore

    @property
    def process_group(self) -> BaguaProcessGroup:
        """The group that communicates."""
        return self.bagua_ddp.process_group

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """``(name, parameter)`` of all parameters that are trained and not ignored."""
        return self.bagua_ddp.bagua_build_params()

    def bagua_samples(self, number: SupportsFloat) -> None:
        """Say how many samples, or tokens, this rank's next training forward is of.

        The result of a step is then the mean of the ranks' gradients weighted by these numbers, as
        of one process with all samples; a rank that says none counts 1. Call it before each
        training forward; the numbers of forwards inside :meth:`no_sync` add up. It sends nothing:
        numbers travel, as float32, with what opens a round.

        Args:
            number: finite, 0 or more. A rank with 0 contributes zeros; with 0 on all ranks the
                gradients are zero. Only the numbers' ratios matter.

        Raises:
            ValueError: a number that cannot be.
            NotImplementedError: the algorithm averages weights (``decentralized``, ``async``).
            BaguaError: from the next forward: the step has begun with another number.

        Example::

            model.bagua_samples(len(targets))
            loss_function(model(inputs), targets).backward()  # the mean over this rank's targets
        """
        self.bagua_ddp.bagua_samples(number)

    def bagua_stats(self) -> dict[str, Any]:
        """Bytes that this rank sent and times it took, since the buckets were built.

        Sums over all rounds; bytes are payload without packet headers, times nanoseconds.

        Returns:
            - ``rounds``: how many synchronising steps. ``built``: how many times buckets were
              built, which begins the counts anew.
            - ``buckets``: per bucket ``name``, ``ops``, ``bytes`` (its size), ``rounds``;
              ``bytes_sent``, ``bytes_received``, ``messages_sent``, ``messages_received``;
              ``shm_bytes``, the part of ``bytes_sent`` that went through memory of one host;
              ``wire_ns`` inside communicators, ``encode_ns`` in operations but not on the wire
              (encoding, decoding, adding, copying), ``busy_ns`` the sum of the two; ``waiting_ns``
              from the last of its tensors being ready to the start of its operations;
              ``hidden_ns``, the part of ``busy_ns`` in which the caller was not blocked;
              ``nonfinite_rounds``, after how many of them the result held NaN or infinity (None on
              CUDA, where they are not counted).
            - ``total``: sums over the buckets. Lanes run at the same time, so times in it may
              exceed the time that has passed.
            - ``busy_ns``, ``hidden_ns``: wall-clock time in which at least one lane was busy, and
              the part in which the caller was not blocked: the overlap won. ``exposed_ns``: the
              caller was blocked by communication; ``longest_wait_ns``, its longest stretch.
            - ``communicators``: bytes, messages and ``wire_ns`` by purpose: ``all`` ranks,
              ``node`` (inside a node), ``leaders`` (between nodes), ``buffers``, ``check``,
              ``guard``.
            - ``control``: the same of the ranks' agreements.
            - ``network``: ``round_trip_ms``, of a message between the two ranks that are farthest
              apart (0: not known, or on one host), ``lanes``, the number of buckets that are
              under way at a time, and ``congestion_control`` of TCP between far ranks, else empty.
            - ``choice``, of ``auto`` only: ``state`` ("trying", "chosen"), ``chosen``, ``why``,
              ``turns``, how often candidates were tried, and ``table`` with ``candidate``,
              ``seconds`` of a step, ``error`` and ``refusal`` of each candidate.
            - ``guard``, with a guard only: ``rounds``, ``checks``; ``buckets`` by name, each with
              the figures last measured (``relative_error``, ``residual``, ``consensus``);
              ``nonfinite_share`` of the rounds between the last two checks; ``breaches``, figures
              above a threshold, with ``round``, ``bucket``, ``figure``, ``value`` and
              ``threshold``.

            Asynchronous averaging has one bucket: ``rounds`` counts averages applied,
            ``waiting_ns`` is its lane's time before the gate and ``exposed_ns`` training's.
        """
        return self.bagua_ddp.stats()

    def bagua_summary(self) -> str:
        """Three lines for people: the algorithm, bytes and time per round, of this rank.

        A round is a synchronising step, or an outer round. Sums are those of :meth:`bagua_stats`,
        so they begin anew when the buckets are built anew, as after a warm-up.

        Returns:
            - the algorithm (of ``auto`` its choice), ranks, rounds, size and operations of buckets;
            - megabytes sent per round, and those of an exact all-reduce;
            - milliseconds in which training was blocked, per round and at most, and the share of
              communication that ran behind computation.

        Example::

            print(model.bagua_summary())
            # ByteGrad, 2 ranks, 100 rounds of 0.0677 MB: CompressedAllReduce(block_uint8, ...)
            # sent 0.0172 MB per round and rank (an exact all-reduce: 0.0677 MB)
            # blocked 0.604 ms per round, at most 3.92 ms; 5% of communication is hidden behind ...
        """
        algorithm = type(self.bagua_algorithm).__name__.removesuffix("AlgorithmImpl")
        return summary(algorithm, len(self.process_group.ranks), self.bagua_stats())

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether forwards communicate; may be set, which is what :meth:`no_sync` does."""
        ddp: Session | None = self.__dict__.get("_bagua_ddp")
        if ddp is not None:
            return ddp.require_backward_grad_sync
        enabled: bool = self.__dict__.get(_SYNCHRONISES, True)  # not wrapped yet, or a copy
        return enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, enabled: bool) -> None:
        if "_bagua_ddp" in self.__dict__:
            self.bagua_ddp.require_backward_grad_sync = enabled
        else:
            self.__dict__[_SYNCHRONISES] = enabled

    def _attach(self, ddp: Session) -> None:
        ddp.require_backward_grad_sync = self.require_backward_grad_sync
        self.__dict__.pop(_SYNCHRONISES, None)
        self.__dict__["_bagua_ddp"] = ddp

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication: forward and backward go inside."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _bagua_plain(self) -> torch.nn.Module:
        twin = plain_twin(self, self._bagua_original, self.bagua_ddp.hook_ids())
        twin.__dict__[_COPY_OF] = self._bagua_original.__name__
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        result = copy.deepcopy(self._bagua_plain(), memo)
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # From protocol 2 on pickle insists that the class it writes is the object's own. The older
        # way does not, and what it writes is loaded without this package.
        return self._bagua_plain().__reduce_ex__(1)


def plain_twin(module: Any, original: type[torch.nn.Module], hooks: list[int]) -> torch.nn.Module:
    """A module of class ``original`` that shares everything with ``module`` but those hooks."""
    twin = original.__new__(original)
    state = dict(module.__dict__)
    state.pop("_bagua_ddp", None)
    for table in _HOOK_TABLES:
        state[table] = state[table].copy()
        for hook_id in hooks:
            state[table].pop(hook_id, None)
    twin.__dict__.update(state)
    return twin


#: In the ``__dict__`` of copies of wrapped modules: the name of the class.
_COPY_OF = "_bagua_copy_of"


class _TrainsAlone(DroppedOnCopy):
    """A forward pre-hook of a copy, which warns once when the copy is trained on its own."""

    def __init__(self) -> None:
        self.handle: torch.utils.hooks.RemovableHandle | None = None

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        trained = [p for p in module.parameters() if p.requires_grad]
        wrapped = torch.nn.parallel.DistributedDataParallel._active_ddp_module is not None
        if not (module.training and torch.is_grad_enabled() and trained) or wrapped:
            return
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if is_owned(trained[0]):
            return
        forget_copy(module)
        warn(
            f"this {type(module).__name__} is a copy of a module that bagua.wrap has wrapped, and "
            "is trained without the other ranks. Call bagua.wrap on the copy, on every rank, if it "
            "is to be trained with them."
        )


def watch_copy(module: torch.nn.Module) -> None:
    if _COPY_OF not in module.__dict__:
        return
    hook = _TrainsAlone()
    hook.handle = module.register_forward_pre_hook(hook)


def forget_copy(module: torch.nn.Module) -> None:
    """Make a copy of a wrapped module a module like any other. Idempotent."""
    if module.__dict__.pop(_COPY_OF, None) is None:
        return
    for hook in list(module._forward_pre_hooks.values()):
        if isinstance(hook, _TrainsAlone) and hook.handle is not None:
            hook.handle.remove()


_classes: dict[type, type] = {}


def _class_of(module: torch.nn.Module) -> type:
    """The class of ``module`` when it is wrapped; TypeError where Python cannot change it."""
    original = type(module)
    if isinstance(module, BaguaModule):
        return original
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("bagua.wrap cannot wrap a ScriptModule; wrap the module, then script it")
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_bagua_original": original,
    }
    try:
        if original not in _classes:
            _classes[original] = type(original.__name__, (BaguaModule, original), names)
        module.__class__ = _classes[original]
        module.__class__ = original
    except Exception as error:
        raise TypeError(
            f"bagua.wrap makes {original.__qualname__} a subclass of its class, which failed: "
            f"{error}. Wrap a module that contains it, or take "
            "bagua.torch_api.data_parallel.DistributedDataParallel."
        ) from error
    return _classes[original]
