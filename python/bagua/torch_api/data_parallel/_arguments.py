"""Arguments of torch's DistributedDataParallel: their meaning here, and which are refused.

What each function raises is what the class documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from bagua._core.group.job import as_bagua_group, ensure_initialised, group_of_mesh
from bagua._core.group.process_group import BaguaProcessGroup
from bagua._core.group.warn import warn
from bagua._core.state.initial_state import InitialState
from bagua._core.state.snapshot import ignored_names
from bagua.torch_api.distributed import BaguaModule


def refuse_mixed_precision(mixed_precision: Any) -> None:
    if mixed_precision is not None:
        raise NotImplementedError(
            "DistributedDataParallel(mixed_precision=...) is not supported; use torch.autocast, or "
            "cast the module before wrapping it"
        )


def warn_of_check_reduction(check_reduction: bool) -> None:
    if check_reduction:
        warn("check_reduction is deprecated and does nothing", FutureWarning)


def check_delayed(
    module: torch.nn.Module,
    named: Sequence[tuple[str, torch.nn.Parameter]] | None,
    hooked: torch.nn.Parameter | None,
) -> None:
    """Check the parameters whose reduction is to be delayed until ``hooked`` is ready.

    They are reduced in the buckets of all others: the result is the same.
    """
    if (named is None) != (hooked is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same "
            "time."
        )
    own = {id(parameter) for parameter in module.parameters()}
    foreign = [name for name, parameter in named or () if id(parameter) not in own]
    if foreign:
        raise ValueError(
            f"delay_all_reduce_named_params: '{foreign[0]}' is not a parameter of the module. "
            "Register it there, or all-reduce its gradient with "
            "bagua.torch_api.data_parallel.functional.all_reduce."
        )


def check_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"DistributedDataParallel wraps a torch.nn.Module, not {module!r}")
    if isinstance(module, BaguaModule) and not isinstance(module, TorchDDP):
        raise TypeError(
            "DistributedDataParallel: the module is wrapped already, by bagua.wrap; wrap it once"
        )
    ignored = ignored_names(module)
    named = [(name, p) for name, p in module.named_parameters() if name not in ignored]
    lazy = [name for name, p in named if torch.nn.parameter.is_lazy(p)]
    if lazy:
        raise RuntimeError(
            f"parameter '{lazy[0]}' is uninitialised; run a forward before DistributedDataParallel"
        )
    if not any(p.requires_grad for _, p in named):
        raise RuntimeError(
            "DistributedDataParallel is not needed: no parameter of the module needs a gradient"
        )
    types = sorted({p.device.type for _, p in named})
    if len(types) > 1:
        raise ValueError(
            f"the module's parameters are on different types of device: {', '.join(types)}; move "
            "it to one before DistributedDataParallel"
        )
    return [p for _, p in named]


def devices(
    parameters: Sequence[torch.nn.Parameter], device_ids: Any, output_device: Any
) -> tuple[list[int] | None, int | None]:
    """``device_ids`` and ``output_device`` as indices; None where the module dictates them."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids={device_ids} must be None or one device: start one process per device"
        )
    places = {p.device for p in parameters}
    own = parameters[0].device
    if not device_ids:
        if output_device is not None:
            raise ValueError(f"output_device={output_device} needs device_ids=[{output_device}]")
        return None, None
    if own.type == "cpu" or len(places) > 1:
        raise ValueError(
            f"device_ids={device_ids} is for modules on one accelerator; this one is on "
            f"{', '.join(sorted(map(str, places)))}: pass device_ids=None"
        )
    index = _index(device_ids[0], own.type)
    if index != own.index:
        raise ValueError(
            f"device_ids={device_ids}, but the module is on {own}: move it to {own.type}:{index}"
        )
    if output_device is not None and _index(output_device, own.type) != index:
        raise ValueError(
            f"output_device={output_device} must be the module's device {own} or None: the output "
            "stays where the module makes it"
        )
    return [index], index


def _index(device: Any, device_type: str) -> int | None:
    if isinstance(device, int):
        return device
    described = torch.device(device)
    return described.index if described.type == device_type else None


@dataclass(frozen=True)
class Groups:
    """The group that communicates: as torch has it, where it does, and as bagua has it."""

    shown: dist.ProcessGroup | BaguaProcessGroup
    bagua: BaguaProcessGroup

    @property
    def default(self) -> bool:
        return self.shown is dist.group.WORLD


def groups(process_group: Any, device_mesh: Any) -> Groups:
    """The groups of ``process_group``: None, torch's or bagua's; or of a mesh of one dimension."""
    process_group = group_of_mesh(process_group)
    if device_mesh is not None:
        if process_group is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}: pass the slice over "
                "which gradients are averaged"
            )
        process_group = device_mesh.get_group(mesh_dim=0)
    ensure_initialised()
    world = dist.group.WORLD
    assert world is not None
    if process_group is world:
        process_group = None
    bagua = as_bagua_group(process_group)
    if process_group is None or (
        process_group is bagua and bagua.ranks == list(range(dist.get_world_size()))
    ):
        return Groups(world, bagua)
    return Groups(process_group, bagua)


def bucket_bytes(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
) -> int | tuple[int, ...] | None:
    """MiB to bytes: one limit, or one for each bucket, of which the last holds for the rest."""
    if bucket_cap_mb_list:
        return tuple(_bytes_of("bucket_cap_mb_list", cap) for cap in bucket_cap_mb_list)
    return None if bucket_cap_mb is None else _bytes_of("bucket_cap_mb", bucket_cap_mb)


def _bytes_of(name: str, mebibytes: float) -> int:
    if mebibytes <= 0:
        raise ValueError(f"{name}={mebibytes} must be a positive number of MiB")
    return max(1, int(mebibytes * 1024**2))


def buffers_and_state(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None, init_sync: bool
) -> tuple[bool | None, InitialState]:
    """Whether forwards broadcast buffers (None: as the algorithm has it), and what the wrap gives.

    As torch has it, ``broadcast_buffers=False`` keeps buffers local at the wrap as well, and
    ``forward_sync_buffers=False`` does not.
    """
    if not init_sync:
        state: InitialState = "nothing"
    elif forward_sync_buffers is None and broadcast_buffers is False:
        state = "without buffers"
    else:
        state = "all"
    if forward_sync_buffers is not None:
        return forward_sync_buffers, state
    return broadcast_buffers, state
