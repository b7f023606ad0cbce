"""``compress``: has torch's FSDP2 send compressed gradients and weights."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bagua import _C
from bagua._core.group.job import ensure_initialised
from bagua._ops.lane import Lane
from bagua._ops.operations import codec_named
from bagua.fsdp._collectives import AllGather, ReduceScatter
from bagua.fsdp._handle import Handle, Options
from bagua.fsdp._mesh import Groups, bagua_groups, mesh_of
from bagua.fsdp._replicas import all_reduce_can_be_replaced

__all__ = ["compress"]

_HOOKS = ("set_custom_reduce_scatter", "set_custom_all_gather")
_compressed: weakref.WeakSet[FSDPModule] = weakref.WeakSet()


def compress(
    model: torch.nn.Module,
    codec: str = "block_uint8",
    *,
    weights: bool = False,
    reduce_scatter: bool | None = None,
    error_feedback: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Handle:
    """Have every FSDP module of ``model`` reduce its gradients through ``codec``.

    Every rank calls it, once, after the last ``fully_shard`` and before the first forward.
    Initialises bagua over ``torch.distributed`` if that has not been done.

    Args:
        model: after ``fully_shard`` on a mesh of one dimension, or of two with hybrid sharding
            (HSDP), or after ``replicate()``.
        codec: ``"block_uint8"`` or another one of docs/wire-format.md. The all-reduce over replicas
            always goes through it.
        weights: whether weights are gathered through the codec, too. Shards and checkpoints stay
            exact; forward and backward see rounded weights, equal on all ranks.
        reduce_scatter: whether the reduce-scatter of gradients over the shards goes through the
            codec. Default: with a mesh of one dimension yes; with hybrid sharding no, as shards are
            near each other then.
        error_feedback: whether each rank adds to its gradients what compression has taken from
            those of the last step. Takes 8 bytes per parameter of the whole model on every rank.
            Not with replicas.
        grad_scaler: the scaler that the loss is multiplied with, if there is one; needed for
            ``error_feedback`` only.

    Returns:
        Statistics and residuals. It need not be kept.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no module of it is sharded, the codec is unknown, or an argument asks for
            nothing.
        NotImplementedError: tensor parallelism, several meshes, error feedback with replicas, or a
            torch without the interface.
        RuntimeError: the model is compressed already.
        BaguaMismatchError: the ranks' models or arguments differ.
        BaguaError: a rank did not come, or was lost.

    Example::

        fully_shard(model)
        handle = compress(model)
        loss_function(model(inputs), targets).backward()
        handle.stats()["total"]["bytes_sent"]
    """
    modules = _sharded_modules(model)
    codec = codec_named(codec)
    mesh, fields = mesh_of(model)
    if reduce_scatter is None:
        reduce_scatter = fields == ["shards"]
    _check_arguments(fields, weights, reduce_scatter, error_feedback)
    ensure_initialised()
    groups = bagua_groups(mesh, fields)
    scaled = error_feedback and grad_scaler is not None and grad_scaler.is_enabled()
    options = Options(
        codec=codec,
        weights=weights,
        reduce_scatter=reduce_scatter,
        error_feedback=error_feedback,
        read_scale=grad_scaler.get_scale if scaled and grad_scaler is not None else _one,
    )
    names = _names_of_groups(modules, type(model).__name__)
    handle = _connect(model, names, mesh.device_type, groups, options, scaled)
    for module, name in names.items():
        _install(module, name, handle, options)
    return handle


def _check_arguments(
    fields: list[str], weights: bool, reduce_scatter: bool, error_feedback: bool
) -> None:
    sharded, replicated = "shards" in fields, "replicas" in fields
    if not sharded and (weights or reduce_scatter):
        name = "weights" if weights else "reduce_scatter"
        raise ValueError(
            f"bagua.fsdp.compress: {name}=True, but no parameter is sharded: after replicate() "
            "ranks exchange nothing but the all-reduce of gradients; leave it out"
        )
    if not (replicated or weights or reduce_scatter):
        raise ValueError(
            "bagua.fsdp.compress: reduce_scatter=False without weights=True compresses nothing: "
            "the mesh has no replicas. Leave reduce_scatter out"
        )
    if replicated and error_feedback:
        raise NotImplementedError(
            "bagua.fsdp.compress: error_feedback=True is not supported with replicas (hybrid "
            "sharding, replicate()); use codec='block_uint8' without it"
        )
    if replicated and not all_reduce_can_be_replaced():
        raise NotImplementedError(
            "bagua.fsdp.compress: torch.distributed.all_reduce of torch "
            f"{torch.__version__} does not honour __torch_function__, by which the all-reduce over "
            "replicas is compressed; shard over a mesh of one dimension"
        )


def _connect(
    model: torch.nn.Module,
    names: dict[FSDPModule, str],
    device_type: str,
    groups: Groups,
    options: Options,
    scaled: bool,
) -> Handle:
    """The communication of ``model``, once the ranks agree on it."""
    model_name = type(model).__name__
    description = [
        f"{options.codec} weights={options.weights} reduce_scatter={options.reduce_scatter} "
        f"error_feedback={options.error_feedback} scaled={scaled}"
    ]
    description += [
        f"module {name}" for name, m in model.named_modules() if isinstance(m, FSDPModule)
    ]
    description += [f"{name}: {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    connections = groups.everyone.connections
    with connections.collective_phase(f"compressing the communication of '{model_name}'"):
        connections.agree("the model or the arguments of bagua.fsdp.compress", description)
        wrap = connections.next_wrap()
        # Groups of shards and replicas have names of their own for what is wrapped.
        lane_name = f"{groups.everyone.group_name}/{wrap}/lane0"
        lane = Lane(lane_name, torch.device(device_type), groups.everyone)
        numels = {}
        if options.error_feedback:
            numels = _reduced_numels(model, names, groups.everyone.size)
        handle = Handle(model_name, options, groups, lane, wrap, numels)
        # A rank must not go on while another is still connecting to it.
        connections.reduce_numbers("compressing the communication", _C.ReduceOp.SUM, 0)
    return handle


def _one() -> float:
    return 1.0


def _sharded_modules(model: Any) -> dict[str, FSDPModule]:
    """By name, outer ones first."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"bagua.fsdp.compress takes a torch.nn.Module, not {type(model).__name__}")
    missing = [hook for hook in _HOOKS if not hasattr(FSDPModule, hook)]
    if missing:
        raise NotImplementedError(
            f"bagua.fsdp.compress needs FSDPModule.{missing[0]}, which torch {torch.__version__} "
            "does not have; torch 2.11 to 2.13 have it"
        )
    modules = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    if not modules:
        raise ValueError(
            f"bagua.fsdp.compress: no module of '{type(model).__name__}' is sharded; call "
            "torch.distributed.fsdp.fully_shard(model) first (FSDP1's FullyShardedDataParallel is "
            "not supported)"
        )
    for name, module in modules.items():
        if module in _compressed:
            raise RuntimeError(
                f"bagua.fsdp.compress: module '{name}' is compressed already; call it once, on the "
                "outermost module"
            )
    return modules


def _names_of_groups(modules: dict[str, FSDPModule], model_name: str) -> dict[FSDPModule, str]:
    """A name for each module; modules that were sharded together communicate under one."""
    names: dict[FSDPModule, str] = {}
    first: dict[int, str] = {}
    for name, module in modules.items():
        names[module] = first.setdefault(id(module._get_fsdp_state()), name or model_name)
    return names


def _reduced_numels(
    model: torch.nn.Module, names: dict[FSDPModule, str], ranks: int
) -> dict[str, int]:
    """Elements that each module reduces: of its parameters' gradients, padded to equal shards."""
    numels: dict[str, int] = {}

    def visit(module: torch.nn.Module, owner: str | None) -> None:
        owner = names[module] if isinstance(module, FSDPModule) else owner
        for parameter in module.parameters(recurse=False):
            if owner is None or parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            if isinstance(parameter, DTensor):
                dimension: int = parameter.placements[0].dim  # type: ignore[attr-defined]
                length = parameter.size(dimension)
                rows = parameter.numel() // max(1, length)
                numels[owner] = numels.get(owner, 0) + -(-length // ranks) * ranks * rows
        for child in module.children():
            visit(child, owner)

    seen: set[torch.nn.Parameter] = set()
    visit(model, None)
    return numels


def _install(module: FSDPModule, name: str, handle: Handle, options: Options) -> None:
    reduce_scatter: Any = ReduceScatter(handle, name, options.reduce_scatter)
    all_gather: Any = AllGather(handle, name, options.weights)
    module.set_custom_reduce_scatter(reduce_scatter)
    module.set_custom_all_gather(all_gather)
    if options.error_feedback and hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
    _compressed.add(module)
