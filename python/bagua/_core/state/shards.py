"""Tensors of which this rank holds a shard: torch's DTensors, of FSDP2 and tensor parallelism."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["is_sharded", "label_of", "local", "place_of", "ranks_of", "reshard", "whole"]


def _loaded(module: str) -> Any:
    """A module of torch whose import is slow, if something has imported it."""
    return sys.modules.get(module)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor."""
    torchs = _loaded("torch.distributed.tensor")
    return torchs is not None and isinstance(tensor, torchs.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, without autograd, of the same memory; of a plain tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def whole(shard: torch.Tensor, like: Any) -> torch.Tensor:
    """The DTensor of which ``shard`` is this rank's part, placed as ``like``.

    ``shard`` itself where ``like`` is a plain tensor, or its shard has another shape.
    """
    if not is_sharded(like) or local(like).shape != shard.shape:
        return shard
    made: torch.Tensor = _loaded("torch.distributed.tensor").DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.size(),
        stride=like.stride(),
    )
    return made


def place_of(tensor: Any) -> str:
    """Placements and the number of this rank's shard, equal on all ranks that hold that shard."""
    mesh = tensor.device_mesh
    placements = ", ".join(map(repr, tensor.placements))
    return f"{placements} of a mesh {tuple(mesh.shape)}, shard {tuple(mesh.get_coordinate())}"


def label_of(tensors: Iterable[Any]) -> tuple[str, str]:
    """(this rank's place in the meshes of ``tensors``, their shapes); empty without DTensors."""
    meshes = {tensor.device_mesh for tensor in tensors if is_sharded(tensor)}
    places = sorted((tuple(mesh.shape), tuple(mesh.get_coordinate())) for mesh in meshes)
    shapes = ["x".join(map(str, shape)) for shape, _ in places]
    own = [".".join(map(str, coordinate)) for _, coordinate in places]
    return "-".join(map("of".join, zip(own, shapes, strict=True))), "-".join(shapes)


def ranks_of(tensor: Any) -> set[int]:
    """Global ranks that hold shards of a DTensor."""
    return set(tensor.device_mesh.mesh.flatten().tolist())


def reshard(module: torch.nn.Module) -> None:
    """Have FSDP2's modules show their shards, which the outermost one does not after a forward."""
    torchs = _loaded("torch.distributed.fsdp")
    if torchs is not None:
        for child in module.modules():
            if isinstance(child, torchs.FSDPModule):
                child.reshard()
