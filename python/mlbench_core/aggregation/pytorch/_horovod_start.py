"""Finds Horovod and starts it: under horovodrun, under torchrun, or alone."""

from __future__ import annotations

import importlib
import os
import socket
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch.distributed as dist
from bagua._core.group import environment as env
from bagua._core.group.rendezvous import rendezvous
from torch.distributed import distributed_c10d as c10d

__all__ = ["import_horovod", "start_horovod"]

_HOW_TO_GET_IT = (
    "Build it for this environment's torch with `make horovod` in bagua's source tree (three "
    "minutes; tools/build_horovod PYTHON for another environment), as docs/aggregation.md says."
)

# Marks an environment in which start_horovod has set Horovod's variables.
_OURS = "BAGUA_STARTED_HOROVOD"


class _Rendezvous:
    """Rank 0's server. Horovod asks it again for every process set, so it lives on."""

    server: Any = None


def import_horovod() -> ModuleType:
    """The module ``horovod.torch``.

    Raises:
        ImportError: it is not installed, or not built for this torch; says how to get it.
    """
    try:
        horovod = importlib.import_module("horovod.torch")
    except ImportError as error:
        raise ImportError(
            f"AllReduceAggregationHVD needs Horovod, which cannot be imported ({error}). "
            + _HOW_TO_GET_IT
        ) from error
    if not hasattr(horovod, "allreduce"):  # its import only prints what is wrong
        raise ImportError(
            "AllReduceAggregationHVD needs Horovod, and the one that is installed was not built "
            "for this torch. " + _HOW_TO_GET_IT
        )
    return horovod


def start_horovod(horovod: ModuleType) -> None:
    """Initialise Horovod if it is not. All ranks call it.

    Under ``horovodrun`` (or ``mpirun``, with a Horovod built for it) the launcher has said
    everything. Under torchrun the processes find each other through torch's store, with or without
    an initialised ``torch.distributed``. Without a launcher this process is alone.

    Raises:
        ValueError: the launcher's environment variables are incomplete, or Horovod cannot start.
        torch.distributed.DistStoreError: another rank did not come within the store's timeout.
    """
    if horovod.is_initialized():
        return
    # Variables that this function set, or that a parent process's left, are of an earlier start.
    if "HOROVOD_RANK" not in os.environ or _OURS in os.environ:
        if dist.is_initialized():
            store, rank, size = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        else:
            rank, size, store = rendezvous(None, -1, -1, -1, None)
        if size > 1:
            os.environ.update(_variables(store, rank, size))
    horovod.init()


def _variables(store: c10d.Store, rank: int, size: int) -> dict[str, str]:
    """Environment that horovodrun would set for this rank.

    1. Every rank says on which node it is. Starts are numbered by this rank's visits to the store,
       which may outlive one.
    2. Rank 0 serves Horovod's rendezvous and says where.
    3. Every rank derives its place among those of its node and among the nodes.
    """
    # 1.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    visit = store.add(f"bagua/horovod/{restarts}/visits/{rank}", 1)
    store = c10d.PrefixStore(f"bagua/horovod/{restarts}/{visit}", store)
    store.set(f"node/{rank}", str(env.get_node_rank()))
    nodes = [int(store.get(f"node/{other}")) for other in range(size)]
    places = _places(nodes)
    one_node = len(set(nodes)) == 1
    # 2.
    if rank == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        store.set("server", f"{host} {_serve(places)}")
    host, port = store.get("server").decode().split()
    # 3.
    variables = {
        **places[rank].variables(),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1" if one_node else socket.gethostbyname(host),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        _OURS: "1",
    }
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo" if one_node else "").split(",")[0]
    if interface and "HOROVOD_GLOO_IFACE" not in os.environ:
        variables["HOROVOD_GLOO_IFACE"] = interface
    return variables


@dataclass(frozen=True)
class _Place:
    """A rank among all, among those of its node, and among its peers: one per node."""

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def variables(self) -> dict[str, str]:
        """Return the variables that horovodrun sets."""
        return {f"HOROVOD_{name.upper()}": str(value) for name, value in vars(self).items()}


def _places(nodes: list[int]) -> list[_Place]:
    """``nodes``: the node of every rank. Peers have the same rank among those of their node."""
    local = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    return [
        _Place(
            hostname=f"node{node}",
            rank=rank,
            size=len(nodes),
            local_rank=local[rank],
            local_size=nodes.count(node),
            cross_rank=local[:rank].count(local[rank]),
            cross_size=local.count(local[rank]),
        )
        for rank, node in enumerate(nodes)
    ]


def _serve(places: list[_Place]) -> int:
    """Start Horovod's rendezvous server in a thread of this process; returns its port."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousServer

    if _Rendezvous.server is not None:
        _Rendezvous.server.stop()
    _Rendezvous.server = RendezvousServer()
    port: int = _Rendezvous.server.start()
    _Rendezvous.server.init([SlotInfo(**vars(place)) for place in places])
    return port
