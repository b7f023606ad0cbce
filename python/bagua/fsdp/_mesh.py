"""The ranks over which torch has sharded and replicated a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bagua._core.group.job import as_bagua_group, from_ranks
from bagua._core.group.process_group import BaguaProcessGroup, get_default_group

__all__ = ["Groups", "bagua_groups", "mesh_of"]


@dataclass(frozen=True)
class Groups:
    """Ranks that communicate for one model.

    Attributes:
        everyone: all ranks of the mesh.
        shards: ranks that hold the shards of one copy of the model; None with ``replicate()``.
        replicas: ranks that hold the same shards of all copies; None without hybrid sharding.
    """

    everyone: BaguaProcessGroup
    shards: BaguaProcessGroup | None
    replicas: BaguaProcessGroup | None


def mesh_of(model: torch.nn.Module) -> tuple[DeviceMesh, list[str]]:
    """The mesh of all sharded parameters and, for each of its dimensions, a field of Groups.

    Raises:
        NotImplementedError: the parameters are on several meshes, or sharded over more than one
            dimension; names a parameter.
        ValueError: no parameter is sharded.
    """
    found: tuple[DeviceMesh, list[str]] | None = None
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue  # ignored by fully_shard
        placements = parameter.placements
        fields = ["shards" if p.is_shard() else "replicas" for p in placements]
        known = all(p.is_shard() or p.is_replicate() for p in placements)
        if not known or fields not in (["shards"], ["replicas"], ["replicas", "shards"]):
            raise NotImplementedError(
                f"bagua.fsdp.compress: parameter '{name}' has the placements {placements}: tensor "
                "parallelism is not supported. Shard over a mesh of one dimension, or of two of "
                "which the second shards (HSDP): fully_shard(module, mesh=mesh['replicate', "
                "'shard'])"
            )
        if found is not None and (parameter.device_mesh, fields) != found:
            raise NotImplementedError(
                f"bagua.fsdp.compress: parameter '{name}' is sharded over {parameter.device_mesh}, "
                f"others over {found[0]}; all must be sharded over one mesh"
            )
        found = (parameter.device_mesh, fields)
    if found is None:
        raise ValueError("bagua.fsdp.compress: the model has no sharded parameters")
    return found


def bagua_groups(mesh: DeviceMesh, fields: list[str]) -> Groups:
    """The groups of :func:`mesh_of`'s result. All ranks of the mesh call it."""
    ranks = mesh.mesh.flatten().tolist()
    of_dimensions: list[dist.ProcessGroup] = [mesh.get_group(i) for i in range(mesh.ndim)]
    if ranks == get_default_group().ranks:
        everyone = as_bagua_group(None)
    elif mesh.ndim == 1:
        everyone = as_bagua_group(of_dimensions[0])
    else:
        everyone = from_ranks(ranks, of_dimensions[0])
    if mesh.ndim == 1:
        groups = {fields[0]: everyone}
    else:
        groups = dict(zip(fields, map(as_bagua_group, of_dimensions), strict=True))
    return Groups(everyone, groups.get("shards"), groups.get("replicas"))
