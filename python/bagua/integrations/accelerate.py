"""Bagua's algorithms under Hugging Face Accelerate: ``use(accelerator, algorithm)``.

Accelerate constructs torch's ``DistributedDataParallel`` in ``prepare``, and asks its handler of
``DistributedDataParallelKwargs`` to register a communication hook. :func:`use` replaces that
handler by one that registers a hook of :mod:`bagua.comm_hooks`. For algorithms that do more than
reduce gradients, ``prepare`` calls ``bagua.wrap`` in place of ``DistributedDataParallel``. Where
Accelerate shards by FSDP2, ``prepare`` is followed by ``bagua.fsdp.compress``, or for rounds by
``bagua.wrap`` between the copies.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from bagua import comm_hooks
from bagua._core.group.warn import warn
from bagua._core.state.saved_values import copied
from bagua._core.state.shards import is_sharded
from bagua._sync.handle import LaneHandle
from bagua.torch_api import wrap
from bagua.torch_api._rank_state import rank_state, restore, shared_weights
from bagua.torch_api._session import Session, is_owned
from bagua.torch_api.algorithms import Algorithm, ByteGradAlgorithm, DiLoCoAlgorithm
from bagua.torch_api.distributed import BaguaModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from bagua import fsdp

__all__ = ["TESTED", "Hooks", "install", "use"]

#: The release of Accelerate that the tests of this module run with.
TESTED = "1.15.0"

#: Ways of training in which Accelerate averages gradients by torch's DistributedDataParallel.
_BY_TORCH = {"NO", "MULTI_CPU", "MULTI_GPU"}


class Wrapped:
    """The session of a model that ``prepare`` has given to ``bagua.wrap``, like a hook's handle."""

    def __init__(self, model: BaguaModule) -> None:
        self._model = weakref.ref(model)

    @property
    def session(self) -> Session:
        model = self._model()
        if model is None:
            raise RuntimeError("the model that prepare() has wrapped has been deleted")
        return model.bagua_ddp

    def stats(self) -> dict[str, Any]:
        return self.session.stats()

    def bagua_samples(self, number: SupportsFloat) -> None:
        self.session.bagua_samples(number)

    @property
    def weight(self) -> float:
        return self.session.weight

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: the algorithm's and, where ranks differ, weights and optimizers.

        NotImplementedError for a sharded model, as Accelerate saves shards of one island.
        """
        self._refuse_shards()
        return rank_state(self.session)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; an empty one begins anew, with a warning."""
        self._refuse_shards()
        restore(self.session, state or None, "give use() that algorithm")

    def _refuse_shards(self) -> None:
        if any(map(is_sharded, self.session.module.parameters())):
            raise NotImplementedError(
                "use: Accelerate's checkpoints have the shards of one island, not what each has "
                "trained. Save and load by torch.distributed.checkpoint, "
                '{"training": PerRank(model), "algorithm": model.bagua_algorithm}, as '
                "docs/examples/islands.py does; the weights of all alone by get_state_dict or "
                "save_model after model.bagua_algorithm.sync()"
            )


Handle: TypeAlias = "comm_hooks.Handle | fsdp.Handle | Wrapped"


class Hooks:
    """The communication hooks, or wraps, of the models that an ``Accelerator`` has prepared.

    A pickle or a copy has none of them, like the ``DistributedDataParallel`` in it.
    """

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[torch.nn.Module], Handle]] = []
        self._loading: tuple[list[Handle], list[dict[str, Any]]] = ([], [])

    @property
    def handles(self) -> list[Handle]:
        """One per model, in the order of preparation; empty where there is one process."""
        return [handle for _, handle in self._known]

    def add(self, module: torch.nn.Module, handle: Handle) -> None:
        kept = [pair for pair in self._known if pair[0]() is not module]
        self._known = [*kept, (weakref.ref(module), handle)]

    def of(self, models: Iterable[torch.nn.Module]) -> list[Handle]:
        """The hooks of ``models``, given before or after ``prepare``, in order."""
        known = {module(): handle for module, handle in self._known}
        inner = [module for model in models for module in model.modules()]
        return [known[module] for module in inner if module in known]

    def bagua_samples(self, number: SupportsFloat) -> None:
        """Say how many samples, or tokens, the next training forward of this rank is of.

        That of the model that was prepared last; before each forward, also inside
        ``accelerator.accumulate``. Ranks then weigh by these numbers. One process ignores it.

        Raises:
            ValueError: a number that is not finite, or negative.
            NotImplementedError: the algorithm averages weights.
        """
        for handle in self.handles[-1:]:
            handle.bagua_samples(number)

    @property
    def weight(self) -> float:
        """The factor of this rank's gradients in the last round: 1 unless ranks say samples.

        Its mean over the ranks is 1, so the mean of the ranks' losses times it is that of all
        samples.
        """
        return self.handles[-1].weight if self.handles else 1.0

    def __reduce__(self) -> Any:
        return Hooks, ()

    def save(self, models: list[torch.nn.Module], weights: Any, folder: str) -> None:
        """Write this rank's state, as a hook of ``Accelerator.save_state``."""
        save_hooks(self.of(models), folder)

    def read(self, models: list[torch.nn.Module], folder: str) -> None:
        """Read this rank's state, as a hook of ``Accelerator.load_state``."""
        handles = self.of(models) if models else self.handles  # it names no models of FSDP
        self._loading = handles, read_hooks(handles, folder)

    def restore(self) -> None:
        handles, states = self._loading
        self._loading = [], []
        _load(handles, states)

    def stats(self) -> dict[str, Any]:
        """Statistics of the last prepared model, as ``bagua.comm_hooks.Handle.stats`` has them.

        Raises:
            RuntimeError: no model has been prepared, or this is the only process.
        """
        if not self.handles:
            raise RuntimeError(
                "no hook is registered: prepare a model after use(), with at least two processes"
            )
        return self.handles[-1].stats()


def use(accelerator: accelerate.Accelerator, algorithm: str | Algorithm) -> Hooks:
    """Have ``accelerator`` train by ``algorithm``. Call it on every rank::

        accelerator = Accelerator()
        hooks = use(accelerator, ByteGradAlgorithm())
        model, optimizer, data = accelerator.prepare(model, optimizer, data)

    It comes before ``prepare``, once. Models that are prepared afterwards get a communication hook
    where the algorithm reduces gradients only. With any other there is no
    ``DistributedDataParallel``: ``prepare`` gives the model and its optimizers, in one call, to
    ``bagua.wrap``. Of a model that Accelerate shards by FSDP2 (``fsdp_version=2``), ``bytegrad``
    compresses the gradients between shards, or between the copies of HSDP, as
    ``bagua.fsdp.compress`` does; with ``diloco`` the copies are islands, which meet in rounds, and
    are saved by ``torch.distributed.checkpoint``. Otherwise ``accelerator.save_state`` and
    ``load_state`` include what the algorithm remembers; weights that differ between ranks are saved
    by each rank, and of ``diloco`` the anchor is what ``save_state``, ``save_model`` and
    ``get_state_dict`` show.

    Args:
        algorithm: a registered name, or an object of ``bagua.torch_api.algorithms``.

    Returns:
        The hooks, for their statistics.

    Raises:
        TypeError: ``accelerator`` or ``algorithm`` is something else.
        RuntimeError: a model has been prepared before, or ``use`` was called before; this release
            of Accelerate has no handler of ``DistributedDataParallel``. From ``prepare``: a model
            without the optimizer that the algorithm needs.
        NotImplementedError: the accelerator shards models by FSDP1, DeepSpeed or another engine,
            or compiles with XLA; FSDP2 with another algorithm than ``bytegrad``, or ``diloco``
            between copies. From ``save_state`` and ``load_state``: such islands.
        ValueError: the accelerator's handler has its own communication hook.
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
    accelerator.register_load_state_pre_hook(hooks.read)
    return hooks


def install(accelerator: accelerate.Accelerator, algorithm: str | Algorithm, hooks: Hooks) -> None:
    """Have ``accelerator`` add a hook of ``algorithm`` to ``hooks`` for each model it prepares."""
    # Checks
    if getattr(accelerator, "is_fsdp2", False):
        algorithm = _of_shards(accelerator, algorithm)
    else:
        _check_parallelism(accelerator)
    _check_accelerator(accelerator)
    before = accelerator.ddp_handler or DistributedDataParallelKwargs()
    _check_handler(before)

    accelerator.ddp_handler = _Handler(before, accelerator.scaler, algorithm, hooks)
    accelerator.__class__ = _checking(type(accelerator))


def _of_shards(accelerator: accelerate.Accelerator, algorithm: str | Algorithm) -> Algorithm:
    """``algorithm``, where it is one that can work between shards or copies of FSDP2."""
    if isinstance(algorithm, str):
        algorithm = Algorithm.init(algorithm)
    if isinstance(algorithm, DiLoCoAlgorithm):
        if accelerator.torch_device_mesh is None or "dp_replicate" not in (
            accelerator.torch_device_mesh.mesh_dim_names or ()
        ):
            raise NotImplementedError(
                "use: this Accelerator shards one copy of the model over all ranks, and rounds are "
                "between copies: ParallelismConfig(dp_replicate_size=islands, dp_shard_size=ranks "
                "of an island)"
            )
        return algorithm
    if not isinstance(algorithm, ByteGradAlgorithm):
        raise NotImplementedError(
            f"use: this Accelerator trains by FSDP2, where {type(algorithm).__name__} cannot: take "
            "ByteGradAlgorithm(codec=..., error_feedback=...), DiLoCoAlgorithm(...) between copies "
            "of the model, or leave use() out for exact gradients"
        )
    if algorithm.hierarchical or not algorithm.average:
        raise NotImplementedError(
            "use: this Accelerator trains by FSDP2, whose mesh says where gradients are exact, and "
            "which averages: leave hierarchical= and average= of ByteGradAlgorithm out"
        )
    return algorithm


def _check_parallelism(accelerator: accelerate.Accelerator) -> None:
    kind = accelerator.distributed_type
    parallelism = getattr(accelerator, "parallelism_config", None)
    sharded = parallelism is not None and parallelism.total_size > parallelism.dp_replicate_size
    if kind.name not in _BY_TORCH or sharded:
        raise NotImplementedError(
            f"use: this Accelerator trains by {'a parallelism_config' if sharded else kind.name}, "
            "not by torch's DistributedDataParallel or FSDP2; use takes MULTI_CPU, MULTI_GPU and "
            "FSDP with FullyShardedDataParallelPlugin(fsdp_version=2)"
        )


def _check_accelerator(accelerator: accelerate.Accelerator) -> None:
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
            f"use: the accelerator's handler, a {type(handler).__qualname__}, registers "
            "another communication hook; torch allows one"
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
        arguments: dict[str, Any] = self._bagua[0].to_kwargs()
        return arguments

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        _, scaler, algorithm, hooks = self._bagua
        handle = comm_hooks.register(model, algorithm, grad_scaler=scaler)
        hooks.add(model.module, handle)

    @property
    def hooks(self) -> Hooks:
        return self._bagua[3]

    @cached_property
    def wraps(self) -> bool:
        """Whether the algorithm does more than a communication hook can. Every rank asks."""
        return not comm_hooks.is_hook(self._bagua[2])

    def finish(self, parts: Sequence[Any], ranks: int, islands: DeviceMesh | None = None) -> None:
        """Check, or wrap, the modules of a call of ``prepare`` between several ``ranks``.

        islands: of the ranks that hold the same shard, where FSDP2 shards inside of islands.
        """
        optimizers = [part for part in parts if isinstance(part, AcceleratedOptimizer)]
        for part in parts:
            if isinstance(part, torch.nn.Module):
                if self.wraps:
                    self._wrap(part, [optimizer.optimizer for optimizer in optimizers], islands)
                else:
                    self.refuse_unhooked(part, ranks)

    def _wrap(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        islands: DeviceMesh | None,
    ) -> None:
        _, scaler, algorithm, hooks = self._bagua
        if isinstance(algorithm, str):
            algorithm = Algorithm.init(algorithm)
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        own = [
            optimizer
            for optimizer in optimizers
            if any(id(p) in trained for group in optimizer.param_groups for p in group["params"])
        ]
        if not trained or (not own and hooks.of([model])):
            return
        if not own:
            raise RuntimeError(
                f"use: prepare() got {type(model).__name__} without its optimizer, between whose "
                f"steps {type(algorithm).__name__} communicates. Prepare them in one call: "
                "model, optimizer = accelerator.prepare(model, optimizer)"
            )
        # safetensors loads no weights that are views of a bucket.
        wrapped = wrap(model, own, algorithm, islands, do_flatten=None, grad_scaler=scaler)
        hooks.add(model, Wrapped(wrapped))

    def compress(self, parts: Sequence[Any]) -> None:
        """Compress the communication of the modules that FSDP2 has sharded. Every rank calls it."""
        from bagua import fsdp

        _, scaler, algorithm, hooks = self._bagua
        assert isinstance(algorithm, ByteGradAlgorithm)
        for part in parts:
            if isinstance(part, torch.nn.Module) and not hooks.of([part]):
                residuals = algorithm.error_feedback
                handle = fsdp.compress(
                    part, algorithm.codec, error_feedback=residuals, grad_scaler=scaler
                )
                hooks.add(part, handle)

    def refuse_unhooked(self, model: torch.nn.Module, ranks: int) -> None:
        """Raise RuntimeError for a result of ``prepare`` that the ranks would train apart."""
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained or self.hooks.of([model]) or is_owned(trained[0]):
            return
        raise RuntimeError(
            f"use: the {ranks} ranks would train {type(model).__name__} apart: prepare() has not "
            "wrapped it, so no gradients are communicated. prepare_model(evaluation_mode=True) "
            "before prepare(), as in Trainer.evaluate() or predict() before train(), marks the "
            "module as prepared, with and without bagua. Prepare for training first, or between "
            "the two: del model._is_accelerate_prepared"
        )


class _OfAnIsland:
    """A ``ParallelismConfig`` whose copies of the model are left out where FSDP2 shards."""

    @property
    def fsdp_dim_names(self) -> list[str]:
        names = super().fsdp_dim_names  # type: ignore[misc]
        return [name for name in names if name != "dp_replicate"]


class _Checking:
    """Methods of an ``Accelerator`` that differ with an algorithm."""

    num_processes: int
    is_fsdp2: bool
    torch_device_mesh: DeviceMesh
    ddp_handler: _Handler

    @property
    def parallelism_config(self) -> Any:
        """As Accelerate's; with rounds FSDP2 shards inside of an island, without its copies."""
        found = super().parallelism_config  # type: ignore[misc]
        if found is None or not (self.is_fsdp2 and self.ddp_handler.wraps):
            return found
        found = copy.copy(found)
        found.__class__ = type(type(found).__name__, (_OfAnIsland, type(found)), {})
        return found

    def prepare(self, *args: Any, **options: Any) -> Any:
        """As Accelerate's; RuntimeError where the ranks would train a module apart."""
        prepared = super().prepare(*args, **options)  # type: ignore[misc]
        if self.num_processes > 1:
            parts = prepared if isinstance(prepared, (list, tuple)) else (prepared,)
            if self.is_fsdp2 and self.ddp_handler.wraps:
                islands = self.torch_device_mesh["dp_replicate"]
                self.ddp_handler.finish(parts, self.num_processes, islands)
            elif self.is_fsdp2:
                self.ddp_handler.compress(parts)
            else:
                self.ddp_handler.finish(parts, self.num_processes)
        return prepared

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        """As Accelerate's, without ``DistributedDataParallel`` where ``prepare`` wraps."""
        alone = evaluation_mode or (self.num_processes > 1 and self.ddp_handler.wraps)
        return super().prepare_model(model, device_placement, alone)  # type: ignore[misc]

    def get_state_dict(self, model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        """As Accelerate's; of weights that differ between ranks a copy, of the anchor if any."""
        if not isinstance(model, BaguaModule):
            return super().get_state_dict(model, *args, **options)  # type: ignore[misc]
        with shared_weights(model.bagua_ddp):
            return copied(super().get_state_dict(model, *args, **options))  # type: ignore[misc]

    def load_state(self, *args: Any, **options: Any) -> None:
        """As Accelerate's, and the algorithm's state; ValueError where it is of another one."""
        super().load_state(*args, **options)  # type: ignore[misc]
        self.ddp_handler.hooks.restore()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (type(self).__mro__[2],), *super().__reduce_ex__(protocol)[2:]


def _checking(original: type) -> type:
    return type(original.__name__, (_Checking, original), {"__module__": original.__module__})


def _new(original: type) -> Any:
    made: Any = _checking(original)
    return made.__new__(made)


def _file(folder: str | PathLike[str], rank: int) -> Path:
    return Path(folder) / f"bagua_{rank}.pt"


def save_hooks(handles: Sequence[Handle], folder: str | PathLike[str]) -> None:
    """Write this rank's state into ``folder``, if anything is remembered. Every rank calls it."""
    states = [handle.state_dict() for handle in handles]
    if not any(states):
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = {"size": dist.get_world_size(), "hooks": states}
    torch.save(state, _file(folder, dist.get_rank()))


def load_hooks(handles: Sequence[Handle], folder: str | PathLike[str]) -> None:
    _load(handles, read_hooks(handles, folder))


def _load(handles: Sequence[Handle], states: Sequence[dict[str, Any]]) -> None:
    for handle, state in zip(handles, states, strict=True):
        if state or isinstance(handle, Wrapped):
            handle.load_state_dict(state)


def read_hooks(handles: Sequence[Handle], folder: str | PathLike[str]) -> list[dict[str, Any]]:
    """The states that :func:`save_hooks` has written for ``handles``, empty where there are none.

    With another number of ranks every rank gets the mean of the residuals, and reads all files.
    """
    present = sorted(Path(folder).glob("bagua_*.pt"))
    if present:
        return _states(folder, present, len(handles))
    if any(isinstance(handle, LaneHandle) and handle.state_dict() for handle in handles):
        warn(
            f"{folder} has no state of bagua's hooks: residuals begin at zero, with the weights of "
            "the checkpoint"
        )
    return [{} for _ in handles]


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
