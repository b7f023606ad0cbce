"""Compressed gradients under Hugging Face Accelerate: ``use(accelerator, algorithm)``.

Accelerate constructs torch's ``DistributedDataParallel`` in ``prepare``, and asks its handler of
``DistributedDataParallelKwargs`` to register a communication hook. :func:`use` replaces that
handler by one that registers a hook of :mod:`bagua.comm_hooks`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from bagua import comm_hooks
from bagua.torch_api._session import is_owned
from bagua.torch_api.algorithms import Algorithm

__all__ = ["TESTED", "Hooks", "install", "use"]

#: The release of Accelerate that the tests of this module run with.
TESTED = "1.15.0"

#: Ways of training in which Accelerate averages gradients by torch's DistributedDataParallel.
_BY_TORCH = {"NO", "MULTI_CPU", "MULTI_GPU"}


class Hooks:
    """The communication hooks of the models that an ``Accelerator`` has prepared.

    A pickle or a copy has none of them, like the ``DistributedDataParallel`` in it.

    Attributes:
        handles: one per model, in the order of preparation; empty where there is one process.
    """

    def __init__(self) -> None:
        self.handles: list[comm_hooks.Handle] = []
        self._modules: list[weakref.ref[torch.nn.Module]] = []

    def add(
        self, ddp: torch.nn.parallel.DistributedDataParallel, handle: comm_hooks.Handle
    ) -> None:
        """Remember the hook of ``ddp``."""
        self.handles.append(handle)
        self._modules.append(weakref.ref(ddp.module))

    def of(self, models: Iterable[torch.nn.Module]) -> list[comm_hooks.Handle]:
        """The hooks of ``models``, given as they were before or after ``prepare``, in order."""
        known = {
            id(module()): handle
            for module, handle in zip(self._modules, self.handles, strict=True)
            if module() is not None
        }
        inner = [id(module) for model in models for module in model.modules()]
        return [known[key] for key in inner if key in known]

    def __reduce__(self) -> Any:
        return Hooks, ()

    def save(self, models: list[torch.nn.Module], weights: Any, folder: str) -> None:
        """Write this rank's state, as a hook of ``Accelerator.save_state``."""
        save_hooks(self.of(models), folder)

    def load(self, models: list[torch.nn.Module], folder: str) -> None:
        """Load this rank's state, as a hook of ``Accelerator.load_state``."""
        load_hooks(self.of(models), folder)

    def stats(self) -> dict[str, Any]:
        """Statistics of the last prepared model's hook: see ``bagua.comm_hooks.Handle.stats``.

        Raises:
            RuntimeError: no model has been prepared, or this is the only process.
        """
        if not self.handles:
            raise RuntimeError(
                "no hook is registered: prepare a model after use(), with at least two processes"
            )
        return self.handles[-1].stats()


def use(accelerator: accelerate.Accelerator, algorithm: str | Algorithm) -> Hooks:
    """Have ``accelerator`` reduce gradients by ``algorithm``. Call it on every rank::

        accelerator = Accelerator()
        hooks = use(accelerator, ByteGradAlgorithm())
        model, optimizer, data = accelerator.prepare(model, optimizer, data)

    It comes before ``prepare``, once. Models that are prepared afterwards get a hook.
    ``accelerator.save_state`` and ``load_state`` include what the algorithm remembers.

    Args:
        algorithm: one that reduces gradients, as ``bagua.comm_hooks.register`` takes it.

    Returns:
        The hooks, for their statistics.

    Raises:
        TypeError: ``accelerator`` or ``algorithm`` is something else.
        RuntimeError: a model has been prepared before, or ``use`` was called before; this release
            of Accelerate has no handler of ``DistributedDataParallel``.
        NotImplementedError: the accelerator shards models (FSDP, DeepSpeed, ...) or compiles with
            XLA.
        ValueError: the accelerator's handler has a communication hook of its own.
    """
    # Checks
    if not isinstance(accelerator, accelerate.Accelerator):
        raise TypeError(
            f"use takes an accelerate.Accelerator, not a {type(accelerator).__qualname__}"
        )
    if not isinstance(algorithm, (str, Algorithm)):
        raise TypeError(
            "use: algorithm must be a name or an instance of "
            f"bagua.torch_api.algorithms.Algorithm, not {algorithm!r}"
        )
    hooks = Hooks()
    install(accelerator, algorithm, hooks)
    accelerator.register_save_state_pre_hook(hooks.save)
    accelerator.register_load_state_pre_hook(hooks.load)
    return hooks


def install(accelerator: accelerate.Accelerator, algorithm: str | Algorithm, hooks: Hooks) -> None:
    """Have ``accelerator`` add a hook of ``algorithm`` to ``hooks`` for each model it prepares.

    Raises:
        See :func:`use`.
    """
    # Checks
    _check_accelerator(accelerator)
    before = accelerator.ddp_handler or DistributedDataParallelKwargs()
    _check_handler(before)

    accelerator.ddp_handler = _Handler(before, accelerator.scaler, algorithm, hooks)
    accelerator.__class__ = _checking(type(accelerator))


def _check_accelerator(accelerator: accelerate.Accelerator) -> None:
    kind = accelerator.distributed_type
    parallelism = getattr(accelerator, "parallelism_config", None)
    sharded = parallelism is not None and parallelism.total_size > parallelism.dp_replicate_size
    if kind.name not in _BY_TORCH or sharded:
        raise NotImplementedError(
            f"use: this Accelerator trains by {'a parallelism_config' if sharded else kind.name}, "
            "not by torch's DistributedDataParallel; communication hooks are for MULTI_CPU and "
            "MULTI_GPU"
        )
    if not hasattr(accelerator, "ddp_handler") or not hasattr(accelerator, "_models"):
        raise RuntimeError(
            f"use: accelerate {accelerate.__version__} has no Accelerator.ddp_handler; accelerate "
            f"{TESTED} is known to work. Or register the hook on the result of prepare: "
            "bagua.comm_hooks.register(model, algorithm)."
        )
    if any(isinstance(model, torch.nn.Module) for model in accelerator._models):
        raise RuntimeError(
            "use: a model is prepared already, and would keep its exact gradients; call use() "
            "before accelerator.prepare()"
        )


def _check_handler(handler: DistributedDataParallelKwargs) -> None:
    if isinstance(handler, _Handler):
        raise RuntimeError("use was called for this accelerator already; call it once")
    if type(handler).register_comm_hook is not DistributedDataParallelKwargs.register_comm_hook:
        raise ValueError(
            f"use: the accelerator's handler, a {type(handler).__qualname__}, registers a "
            "communication hook of its own; torch allows one"
        )
    if handler.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"use: the accelerator's handler has comm_hook={handler.comm_hook}; torch allows one "
            "communication hook, so leave it out"
        )


class _Handler(DistributedDataParallelKwargs):  # type: ignore[misc]
    """Arguments of another handler, and a hook of bagua's.

    It does not hold the accelerator, which holds it: that is freed without the cycle collector.
    """

    def __init__(
        self,
        arguments: DistributedDataParallelKwargs,
        scaler: torch.amp.GradScaler | None,
        algorithm: str | Algorithm,
        hooks: Hooks,
    ) -> None:
        super().__init__(**vars(arguments))
        self._bagua = (arguments, scaler, algorithm, hooks)

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of ``DistributedDataParallel`` that differ from their defaults."""
        arguments: dict[str, Any] = self._bagua[0].to_kwargs()
        return arguments

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Called by ``prepare`` with what it has wrapped."""
        _, scaler, algorithm, hooks = self._bagua
        handle = comm_hooks.register(model, algorithm, grad_scaler=scaler)
        hooks.add(model, handle)

    def refuse_unhooked(self, model: torch.nn.Module, ranks: int) -> None:
        """Raise RuntimeError for a result of ``prepare`` that the ranks would train apart."""
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained or self._bagua[3].of([model]) or is_owned(trained[0]):
            return
        raise RuntimeError(
            f"use: the {ranks} ranks would train {type(model).__name__} apart: prepare() has not "
            "wrapped it, so no gradients are communicated. prepare_model(evaluation_mode=True) "
            "before prepare(), as in Trainer.evaluate() or predict() before train(), marks the "
            "module as prepared, with and without bagua. Prepare for training first, or between "
            "the two: del model._is_accelerate_prepared"
        )


class _Checking:
    """Has ``Accelerator.prepare`` raise for a module that it leaves without a hook."""

    num_processes: int
    ddp_handler: _Handler

    def prepare(self, *args: Any, **options: Any) -> Any:
        """As Accelerate's.

        Raises:
            RuntimeError: the ranks would train a module apart, as it was prepared for evaluation.
        """
        prepared = super().prepare(*args, **options)  # type: ignore[misc]
        for part in prepared if isinstance(prepared, tuple) else (prepared,):
            if self.num_processes > 1 and isinstance(part, torch.nn.Module):
                self.ddp_handler.refuse_unhooked(part, self.num_processes)
        return prepared

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (type(self).__mro__[2],), *super().__reduce_ex__(protocol)[2:]


def _checking(original: type) -> type:
    return type(original.__name__, (_Checking, original), {"__module__": original.__module__})


def _new(original: type) -> Any:
    made: Any = _checking(original)
    return made.__new__(made)


def _file(folder: str | PathLike[str], rank: int) -> Path:
    return Path(folder) / f"bagua_{rank}.pt"


def save_hooks(handles: Sequence[comm_hooks.Handle], folder: str | PathLike[str]) -> None:
    """Write this rank's state into ``folder``. Every rank calls it, between two steps.

    Nothing is written for algorithms that remember nothing.
    """
    states = [handle.state_dict() for handle in handles]
    if not any(states):
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = {"size": dist.get_world_size(), "hooks": states}
    torch.save(state, _file(folder, dist.get_rank()))


def load_hooks(handles: Sequence[comm_hooks.Handle], folder: str | PathLike[str]) -> None:
    """Load what :func:`save_hooks` has written. Every rank calls it, before the first step.

    With another number of ranks every rank gets the mean of the residuals, and reads all files.

    Raises:
        ValueError: the state is of another algorithm or model, of another number of models, or
            files of ranks are missing; names what does not fit.
    """
    remembering = [handle for handle in handles if handle.state_dict()]
    present = sorted(Path(folder).glob("bagua_*.pt"))
    if not present:
        if remembering:
            warnings.warn(
                f"{folder} has no state of bagua's hooks: residuals begin at zero, with the "
                "weights of the checkpoint",
                stacklevel=3,
            )
        return
    for handle, state in zip(handles, _states(folder, present, len(handles)), strict=True):
        handle.load_state_dict(state)


def _states(
    folder: str | PathLike[str], present: Sequence[Path], hooks: int
) -> list[dict[str, Any]]:
    """The state of each hook: this rank's own or, of another number of ranks, that of all."""
    own = _file(folder, dist.get_rank())
    content = torch.load(own if own in present else present[0], weights_only=True)
    size = content["size"]
    parts = [content]
    if size != dist.get_world_size() or own not in present:
        missing = [rank for rank in range(size) if not _file(folder, rank).exists()]
        if missing:
            raise ValueError(
                f"{folder} has no bagua_<rank>.pt of ranks {missing} of {size}, and this job has "
                f"{dist.get_world_size()} ranks: copy the files of all ranks there"
            )
        parts = [torch.load(_file(folder, rank), weights_only=True) for rank in range(size)]
    found = {len(part["hooks"]) for part in parts}
    if found != {hooks}:
        raise ValueError(
            f"{folder} has the states of {sorted(found)} models, and {hooks} are prepared here"
        )
    merged: list[dict[str, Any]] = [{} for _ in range(hooks)]
    for part in parts:
        for state, addition in zip(merged, part["hooks"], strict=True):
            state.update(addition)
    return merged
