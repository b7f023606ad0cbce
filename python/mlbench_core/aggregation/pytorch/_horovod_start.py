"""Finds Horovod and starts it: under horovodrun, under torchrun, or alone."""

from __future__ import annotations

import importlib
import os
import socket
from collections import Counter
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua.torch_api import env
from bagua.torch_api._rendezvous import rendezvous

__all__ = ["import_horovod", "start_horovod"]

_HOW_TO_GET_IT = (
    "Build it for this environment's torch with `make horovod` in bagua's source tree (three "
    "minutes; tools/build_horovod PYTHON for another environment), as docs/aggregation.md says."
)


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
    ours = _Rendezvous.server is not None or "BAGUA_STARTED_HOROVOD" in os.environ
    if "HOROVOD_RANK" not in os.environ or ours:
        if dist.is_initialized():
            store, rank, size = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        else:
            rank, size, store = rendezvous(None, -1, -1, -1, None)
        if size > 1:
            os.environ.update(_variables(store, rank, size))
    horovod.init()


def _variables(store: c10d.Store, rank: int, size: int) -> dict[str, str]:
    """What horovodrun would set for this rank.

    1. Every rank says on which node it is; a start is numbered by this rank's visits, because the
       store may outlive a start.
    2. Rank 0 serves Horovod's rendezvous and says where, once it knows all nodes.
    3. Every rank derives its place among those of its node and among the nodes.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    start = store.add(f"bagua/horovod/{restarts}/visits/{rank}", 1)
    store = c10d.PrefixStore(f"bagua/horovod/{restarts}/{start}", store)
    store.set(f"node/{rank}", str(env.get_node_rank()))
    nodes = [int(store.get(f"node/{other}")) for other in range(size)]
    if rank == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        store.set("server", f"{host} {_serve(nodes)}")
    host, port = store.get("server").decode().split()
    one_node = len(set(nodes)) == 1
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo" if one_node else "").split(",")[0]
    variables = {
        **_place(nodes, rank),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1" if one_node else socket.gethostbyname(host),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "BAGUA_STARTED_HOROVOD": "1",
    }
    if interface:
        variables.setdefault(
            "HOROVOD_GLOO_IFACE", os.environ.get("HOROVOD_GLOO_IFACE", interface)
        )
    return variables


def _place(nodes: list[int], rank: int) -> dict[str, str]:
    """Horovod's variables for a rank; ``nodes``: the node of every rank.

    A process set of Horovod's "cross" kind holds the processes with one local rank, one per node
    that has so many.
    """
    local_ranks = [nodes[:other].count(node) for other, node in enumerate(nodes)]
    cross = [other for other in range(len(nodes)) if local_ranks[other] == local_ranks[rank]]
    return {
        "HOROVOD_HOSTNAME": f"node{nodes[rank]}",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(nodes)),
        "HOROVOD_LOCAL_RANK": str(local_ranks[rank]),
        "HOROVOD_LOCAL_SIZE": str(nodes.count(nodes[rank])),
        "HOROVOD_CROSS_RANK": str(cross.index(rank)),
        "HOROVOD_CROSS_SIZE": str(len(cross)),
    }
