"""AllReduceAggregation through Horovod: the class, Horovod's transport, and its start."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import socket
from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.connections import Connections, Peers, everyone, mismatch
from bagua._core.group.rendezvous import rendezvous
from torch.distributed import distributed_c10d as c10d

from mlbench_core.aggregation.pytorch._all_reduce import AllReduceAggregation

_HOW_TO_GET_IT = (
    "Build it for this environment's torch with `make horovod` in bagua's source tree (three "
    "minutes; tools/build_horovod PYTHON for another environment), as docs/aggregation.md says."
)

# Marks an environment in which _start has set Horovod's variables.
_OURS = "BAGUA_STARTED_HOROVOD"

# dtypes that Horovod does not reduce, and what they travel as. Sums of bytes wrap as
# usual when they are narrowed again; half precision is rounded once, after the sum.
_TRAVELS_AS = {
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
}


class AllReduceAggregationHVD(AllReduceAggregation):
    """:class:`AllReduceAggregation` with Horovod for communication; the results are the same.

    Horovod adds or takes the extremes, by ``hvd.allreduce_``; averages are divided here. bfloat16
    travels as float32, bytes and booleans as int32, because Horovod refuses them.

    It needs Horovod and no process group of torch or bagua, but works next to one. Constructing it
    starts Horovod where the script has not: under ``horovodrun``, or under ``torchrun`` without any
    other launcher. Horovod shuts down when the process ends.

    Args:
        world_size: number of ranks.
        divide_before: divide before the sum, so that it does not overflow in half precision.
        use_cuda: hand CUDA tensors to Horovod unchanged, which must be built for that; otherwise
            they go through CPU memory.

    Raises:
        ImportError: Horovod is missing; the message says how to get it.
        ValueError: ``world_size`` is not Horovod's, or Horovod cannot start.
    """

    def __init__(
        self, world_size: int, divide_before: bool = False, use_cuda: bool = False
    ) -> None:
        super().__init__(world_size, divide_before, use_cuda)
        horovod = import_horovod()
        _start(horovod)
        connections = HorovodTransport(horovod)
        self._check_group(connections)
        self._joined = connections

    def _check_group(self, connections: Connections) -> None:
        if connections.size != self.world_size:
            raise ValueError(
                f"{type(self).__name__} was made with world_size={self.world_size}, but Horovod "
                f"has {connections.size} process(es): pass the number that was launched and, under "
                "torchrun, leave hvd.init() to this class"
            )


class HorovodCommunicator:
    """Reductions through ``horovod.torch``, counted as a ``CountingCommunicator`` counts.

    All ranks make the same calls in the same order. Calls return when the result is there.
    """

    def __init__(self, horovod: ModuleType, name: str) -> None:
        self._horovod = horovod
        self._name = name
        self._ops = {
            _C.ReduceOp.SUM: horovod.Sum,
            _C.ReduceOp.MIN: horovod.Min,
            _C.ReduceOp.MAX: horovod.Max,
        }
        self._bytes = 0
        self._messages = 0

    def all_reduce(self, tensor: torch.Tensor, op: _C.ReduceOp) -> None:
        """Reduce one contiguous tensor over all ranks, in place, by ``hvd.allreduce_``."""
        on_wire = tensor.to(_TRAVELS_AS.get(tensor.dtype, tensor.dtype))
        # A name has one shape, so that Horovod need not negotiate it in every step.
        name = f"{self._name}/{tensor.dtype}x{tensor.numel()}"
        self._horovod.allreduce_(on_wire, op=self._ops[op], name=name)
        size = self._horovod.size()
        self._messages += 2 * (size - 1)
        self._bytes += 2 * on_wire.nbytes * (size - 1) // size
        if on_wire is not tensor:
            tensor.copy_(on_wire)

    def traffic(self) -> dict[str, int]:
        """Bytes and messages until now, as of gloo's ring; Horovod itself does not count."""
        return {
            "bytes_sent": self._bytes,
            "bytes_received": self._bytes,
            "messages_sent": self._messages,
            "messages_received": self._messages,
        }


class HorovodTransport(Connections):
    """The ranks of ``horovod.torch``, which is initialised; every aggregation has its own."""

    _objects = itertools.count(1)

    def __init__(self, horovod: ModuleType) -> None:
        nothing = dist.HashStore()  # type: ignore[attr-defined]
        super().__init__(
            nothing, horovod.rank(), list(range(horovod.size())), c10d.default_pg_timeout
        )
        self._horovod = horovod
        self._number = next(self._objects)

    def connect(
        self,
        name: str,
        device: torch.device | str,
        members: list[int] | None = None,
        *,
        sums_of_torch: bool = False,
        nodes_known: bool = False,
        peers: Peers = everyone,
        beside: Sequence[str] = (),
    ) -> _C.CountingCommunicator:
        made = HorovodCommunicator(self._horovod, f"bagua/{self._number}/{name}")
        return cast("_C.CountingCommunicator", made)  # it has the methods that are called here

    def agree(self, what: str, lines: list[str]) -> int:
        text = torch.tensor(list(json.dumps(lines).encode()), dtype=torch.uint8, device="cpu")
        name = f"bagua/{self._number}/lines"
        length = torch.tensor([text.numel()], device="cpu")
        lengths = self._horovod.allgather(length, name=f"{name}/lengths")
        parts = self._horovod.allgather(text, name=name).split(lengths.tolist())
        everyone = [json.loads(bytes(part.tolist())) for part in parts]
        for other, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise mismatch(what, everyone[0], theirs, other)
        return 0  # no engine here has an incarnation


class _Rendezvous:
    """Rank 0's server. Horovod asks it again for every process set, so it lives on."""

    server: Any = None


def import_horovod() -> ModuleType:
    """The module ``horovod.torch``, or an ImportError that says how to get it."""
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


def _start(horovod: ModuleType) -> None:
    """Initialise Horovod if it is not. All ranks call it.

    Under ``horovodrun`` (or ``mpirun``, with a Horovod built for it) the launcher has said
    everything. Under torchrun the processes find each other through torch's store, with or without
    an initialised ``torch.distributed``. Without a launcher this process is alone.
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
    store.set(f"node/{rank}", str(env.get_node_number()))
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
        **{f"HOROVOD_{name.upper()}": str(value) for name, value in vars(places[rank]).items()},
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


def _places(nodes: list[int]) -> list[Any]:
    """Horovod's description of every rank, among all and on its node; ``nodes``: that of each.

    Peers, one per node, have the same rank among those of their node.
    """
    from horovod.runner.common.util.hosts import SlotInfo

    local = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    return [
        SlotInfo(
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


def _serve(places: list[Any]) -> int:
    """Start Horovod's rendezvous server in a thread of this process; returns its port."""
    from horovod.runner.http.http_server import RendezvousServer

    if _Rendezvous.server is not None:
        _Rendezvous.server.stop()
    _Rendezvous.server = RendezvousServer()
    port: int = _Rendezvous.server.start()
    _Rendezvous.server.init(places)
    return port
