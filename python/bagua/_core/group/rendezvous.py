"""Rank, world size and store of this process: from torchrun, from the caller, or alone."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.group.incarnation import OWN_RENDEZVOUS

__all__ = ["connect_store", "make_torch_group", "rendezvous"]

_log = logging.getLogger("bagua")


def rendezvous(
    store: c10d.Store | None,
    rank: int,
    world_size: int,
    local_world_size: int,
    timeout: timedelta | None,
) -> tuple[int, int, c10d.Store]:
    """Place of this process in the job; see ``init_process_group`` for the arguments.

    Raises:
        TypeError: ``store`` is none.
        ValueError: a rank, a size or an environment variable is missing or out of range.
        BaguaError: the store does not answer, or ranks do not come to it.
    """
    if store is not None:
        if not isinstance(store, c10d.Store):
            raise TypeError(
                f"init_process_group(store={store!r}): the first argument is a store of "
                "torch.distributed, not the backend; write init_process_group(backend=...), or "
                "init_process_group() for gloo, and NCCL for CUDA tensors"
            )
        if not (0 <= rank < world_size) or local_world_size <= 0:
            raise ValueError(
                "init_process_group(store=...) needs 0 <= rank < world_size and "
                f"local_world_size > 0, got rank={rank}, world_size={world_size}, "
                f"local_world_size={local_world_size}"
            )
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank % local_world_size),
            LOCAL_WORLD_SIZE=str(local_world_size),
            NODE_RANK=str(rank // local_world_size),
        )
        return rank, world_size, store
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        _log.info("no launcher: a single process. Use torchrun for more.")
        return 0, 1, dist.HashStore()  # type: ignore[attr-defined]
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise ValueError(
            f"environment variable(s) {', '.join(missing)} not set; start the script with "
            "torchrun --nproc_per_node=N script.py, which sets them"
        )
    patience = timeout or c10d.default_pg_timeout
    sockets = _C.OpenedSockets()
    try:
        found, rank, world_size = _C.interruptible(
            next, torch_rendezvous(OWN_RENDEZVOUS, timeout=patience)
        )
        sockets.give_up_after(patience.total_seconds())
    except dist.DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise _C.BaguaError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: the job's store at {place} "
            f"could not be made or reached: {error}. It is with torchrun's agent, or else with "
            "rank 0; check that all ranks run and that MASTER_ADDR and MASTER_PORT are its."
        ) from error
    return rank, world_size, found


def connect_store(address: str, timeout: timedelta) -> c10d.Store:
    """A connection to the store at ``address``, ``"host:port"``.

    Raises:
        ValueError: it is no address.
        BaguaError: there is no store, or it does not answer.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"store={address!r} is no address, such as '10.0.0.1:29500'")
    sockets = _C.OpenedSockets()
    try:
        store: c10d.Store = _C.interruptible(
            lambda: dist.TCPStore(  # type: ignore[attr-defined]
                host.strip("[]"), int(port), is_master=False, timeout=timeout
            )
        )
    except dist.DistError as error:
        raise _C.BaguaError(
            f"there is no store at {address}: {error}. It is that of a torchrun agent with "
            "--master-addr and --master-port, or a TCPStore of your own, and must outlive ranks"
        ) from error
    sockets.give_up_after(timeout.total_seconds())
    return store


def make_torch_group(
    backend: str, store: c10d.Store, rank: int, world_size: int, timeout: timedelta | None
) -> None:
    """torch's default group, over keys of its own.

    Raises:
        BaguaError: it could not be made; says where the other ranks are.
    """
    everyone = list(range(world_size))
    connections = Connections(store, rank, everyone, timeout or c10d.default_pg_timeout)
    with connections.collective_phase("init_process_group"):
        sockets = _C.OpenedSockets()
        try:
            _C.interruptible(
                lambda: dist.init_process_group(
                    backend, store=store, rank=rank, world_size=world_size, timeout=timeout
                )
            )
        except RuntimeError as error:
            raise _C.BaguaError(f"the ranks could not connect to each other: {error}") from error
        sockets.keep_from_children()
