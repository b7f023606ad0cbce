"""``compress``: has torch's FSDP2 send compressed gradients and weights."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bagua import _C
from bagua._core.group.implicit_group import ensure_initialised
from bagua._core.group.job import as_bagua_group
from bagua._core.group.process_group import get_default_group
from bagua._ops.compressed_all_reduce import codec_named
from bagua._ops.contract.lane import Lane
from bagua.fsdp._collectives import AllGather, ReduceScatter
from bagua.fsdp._handle import Handle, Options

__all__ = ["compress"]

_HOOKS = ("set_custom_reduce_scatter", "set_custom_all_gather")
_compressed: weakref.WeakSet[FSDPModule] = weakref.WeakSet()


def compress(
    model: torch.nn.Module,
    codec: str = "block_uint8",
    *,
    weights: bool = False,
    error_feedback: bool = False,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Handle:
    """Have every FSDP module of ``model`` reduce its gradients through ``codec``.

    Every rank calls it, once, after the last ``fully_shard`` and before the first forward.
    Initialises bagua over ``torch.distributed`` if that has not been done.

    Args:
        model: after ``fully_shard``, on a mesh of one dimension.
        codec: ``"block_uint8"`` or another one of docs/wire-format.md.
        weights: whether weights are gathered through the codec, too. Shards and checkpoints stay
            exact; forward and backward see rounded weights, equal on all ranks.
        error_feedback: whether each rank adds to its gradients what compression has taken from
            those of the last step. Takes 8 bytes per parameter of the whole model on every rank.
        grad_scaler: the scaler that the loss is multiplied with, if there is one; needed for
            ``error_feedback`` only.

    Returns:
        Statistics and residuals. It need not be kept.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no module of it is sharded, or the codec is unknown.
        NotImplementedError: hybrid sharding, tensor parallelism, several meshes, or a torch without
            the interface.
        RuntimeError: the model is compressed already.
        BaguaMismatchError: the ranks' models or arguments differ.
        BaguaError: a rank did not come, or was lost.
    """
    modules = _sharded_modules(model)
    codec = codec_named(codec)
    _C.make_codec(codec)
    mesh = _mesh_of(model)
    ensure_initialised()
    of_mesh = mesh.get_group()
    everyone = mesh.mesh.flatten().tolist() == get_default_group().ranks
    group = as_bagua_group(None if everyone else of_mesh)
    scaled = error_feedback and grad_scaler is not None and grad_scaler.is_enabled()
    options = Options(
        codec=codec,
        weights=weights,
        error_feedback=error_feedback,
        read_scale=grad_scaler.get_scale if scaled and grad_scaler is not None else _one,
    )
    model_name = type(model).__name__
    names = _names_of_groups(modules, model_name)
    description = [f"{codec} weights={weights} error_feedback={error_feedback} scaled={scaled}"]
    description += [f"module {name}" for name in modules]
    description += [f"{name}: {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    connections = group.connections
    with connections.collective_phase(f"compressing the communication of '{model_name}'"):
        connections.agree("the model or the arguments of bagua.fsdp.compress", description)
        wrap = connections.next_wrap()
        lane = Lane(f"{wrap}/lane0", torch.device(mesh.device_type), group)
        handle = Handle(model_name, options, lane, wrap, _reduced_numels(model, names, group.size))
        # A rank must not go on while another is still connecting to it.
        connections.reduce_numbers("compressing the communication", _C.ReduceOp.SUM, 0)
    for module, name in names.items():
        _install(module, name, handle, options)
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


def _mesh_of(model: torch.nn.Module) -> DeviceMesh:
    """The mesh of one dimension that all parameters are sharded over."""
    mesh = None
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue  # ignored by fully_shard
        placements = parameter.placements
        if parameter.device_mesh.ndim != 1 or not placements[0].is_shard():
            raise NotImplementedError(
                f"bagua.fsdp.compress: parameter '{name}' has the placements {placements}: hybrid "
                "sharding (HSDP), replicate() and tensor parallelism are not supported. Shard over "
                "a mesh of one dimension: fully_shard(module, mesh=mesh['shard'])"
            )
        if mesh is not None and parameter.device_mesh != mesh:
            raise NotImplementedError(
                f"bagua.fsdp.compress: parameter '{name}' is sharded over {parameter.device_mesh}, "
                f"others over {mesh}; all must be sharded over one mesh"
            )
        mesh = parameter.device_mesh
    if mesh is None:
        raise ValueError("bagua.fsdp.compress: the model has no sharded parameters")
    return mesh


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
    reduce_scatter: Any = ReduceScatter(handle, name)
    all_gather: Any = AllGather(handle, name, options.weights)
    module.set_custom_reduce_scatter(reduce_scatter)
    module.set_custom_all_gather(all_gather)
    if options.error_feedback and hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
    _compressed.add(module)
