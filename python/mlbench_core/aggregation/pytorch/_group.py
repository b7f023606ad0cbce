"""The ranks of an aggregation, and its own connections to them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.group.implicit_group import ensure_initialised
from bagua._core.group.process_group import BaguaProcessGroup, get_default_group
from torch.distributed import distributed_c10d as c10d

__all__ = ["communicator", "member_transport"]


def member_transport(
    process_group: BaguaProcessGroup | None = None, *, world_size: int | None = None
) -> Connections:
    """The connections of this process to the group's members. All members call it.

    Without a group it is bagua's default group, which is made over torch.distributed's where the
    script has initialised that one only. A process without either is alone if it declares that by
    ``world_size=1``, or if no launcher says otherwise.

    Raises:
        RuntimeError: there is no group but there are other ranks, or this process is no member.
    """
    if process_group is not None:
        connections = process_group.connections
    elif dist.is_initialized():
        ensure_initialised()
        connections = get_default_group().connections
    elif world_size == 1 or (world_size is None and os.environ.get("WORLD_SIZE", "1") == "1"):
        lonely = dist.HashStore()  # type: ignore[attr-defined]
        return Connections(lonely, 0, [0], c10d.default_pg_timeout)
    else:
        raise RuntimeError(
            "there is no process group to aggregate in: call "
            "torch.distributed.init_process_group() or bagua.init_process_group() before the "
            "first aggregation"
        )
    if connections.rank < 0:
        raise RuntimeError(
            f"this process is not a member of the group with ranks {connections.ranks}: aggregate "
            "on the members only, or pass another process_group"
        )
    return connections


def communicator(
    connections: Connections, purpose: str, device: torch.device | str
) -> _C.CountingCommunicator:
    """A new communicator of its own. All members make theirs in the same order."""
    name = f"aggregation/{connections.next_wrap()}/{purpose}/{connections.label(device)}"
    return connections.connect(name, device)
