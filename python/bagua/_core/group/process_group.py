"""A set of ranks that communicate, its communicators, and the group of all ranks."""

from __future__ import annotations

import collections
import enum
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.connections import (
    TRAFFIC,
    Connections,
    Wait,
    cuda_transport,
    total_traffic,
)
from bagua._core.group.warn import speak_through

if TYPE_CHECKING:
    from bagua._core.group.membership import Membership

#: False: among all ranks. True: among the nodes' leaders. "sharded": each rank of a node takes part
#: between the nodes, with a share of the bucket.
Hierarchy = bool | Literal["sharded"]
Asked = TypeVar("Asked", bound=Hierarchy)

_MOST_WATCHED = 16  # calls
# For ranks that have not made the group yet.
_PATIENCE_FOR_NODES = timedelta(seconds=10)


class Closable(Protocol):
    """Resource that is closed when the interpreter or the process group ends.

    It may also have ``announce_end()``, called on all resources before the first is closed where
    the program ends well, and ``end_with_group()``, called instead of ``close()``.
    """

    def close(self) -> None: ...


@dataclass(eq=False, kw_only=True)
class Job:
    """One start of bagua in this process: all that it knows until it is destroyed.

    Attributes:
        incarnation: name of the start, equal on all ranks.
        everyone: the group of all ranks, while there is one.
        groups: by name.
        of_torch: groups that were made for torch's.
        new_groups: how many ``new_group`` has made; ``counted``: by members, for torch's.
        made_torchs_group: torch's default group ends with this start, which has made it.
        made_over: torch's default group over which ``ensure_initialised`` has made this one.
    """

    incarnation: str = ""
    everyone: BaguaProcessGroup | None = None
    groups: weakref.WeakValueDictionary[str, BaguaProcessGroup] = field(
        default_factory=weakref.WeakValueDictionary
    )
    of_torch: weakref.WeakKeyDictionary[dist.ProcessGroup, BaguaProcessGroup] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    new_groups: int = 0
    counted: collections.Counter[str] = field(default_factory=collections.Counter)
    made_torchs_group: bool = False
    made_over: weakref.ref[dist.ProcessGroup] | None = None


_job = Job()
_live: weakref.WeakSet[Closable] = weakref.WeakSet()  # of the process, whatever its jobs


def this_job() -> Job:
    return _job


def begin_job(incarnation: str) -> None:
    """A store may outlive several groups, and processes: no key of theirs may be read."""
    global _job
    _job = Job(incarnation=incarnation, made_torchs_group=_job.made_torchs_group)


def close_at_exit(resource: Closable) -> None:
    _live.add(resource)


def close_all(process_ends: bool = False) -> None:
    """Close everything that was given to :func:`close_at_exit`, and forget all groups."""
    resources = list(_live)
    # An uncaught exception is on its way out: the other ranks are not to be waited for.
    if getattr(sys, "last_value", None) is None:
        for resource in resources:
            if hasattr(resource, "announce_end"):
                resource.announce_end()
    failures: list[_C.BaguaError] = []
    for resource in resources:
        try:
            getattr(resource, "end_with_group", resource.close)()
        except _C.BaguaError as error:
            failures.append(error)
    for group in list(_job.groups.values()):
        group.connections.publish_exit(process_ends)
    _job.groups.clear()
    set_default_group(None)
    if failures:
        raise failures[0]


class ReduceOp(enum.IntEnum):
    """Reductions over ranks. AVG is SUM divided by the number of ranks.

    BOR, BAND and BXOR take integers and booleans, AVG floating-point and complex numbers.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


class CommMember(enum.Enum):
    """Stand-ins for a communicator: all ranks, or "this process takes no part"."""

    WORLD = "world"
    NON_COMM_MEMBER = "no member"


class comm:
    """Holds ``comm.WORLD``, another name of ``CommMember.WORLD``."""

    WORLD = CommMember.WORLD


class Watched(threading.local):
    """The ranks of each eager call that this thread makes, but for barriers; None: nobody asks."""

    calls: list[set[int]] | None = None


watched = Watched()


class Communicator:
    """Some members of a process group, numbered from 0, that run eager collectives together.

    Made by ``BaguaProcessGroup.get_*_communicator()``. The first collective makes connections of
    its own for a type of device, so it never gets in the way of a training step. Two members that
    exchange messages before that connect for themselves.

    One thread uses it; only :meth:`abort` may be called from another. All members run the same
    collectives in the same order, with tensors of the same size and dtype.
    """

    def __init__(
        self, connections: Connections, name: str, members: list[int], stream: Any
    ) -> None:
        self.cuda_stream = stream
        self._connections = connections
        self._name = name
        self._members = members
        self._rank = members.index(connections.rank)
        self._ranks = {connections.ranks[member] for member in members}
        # By device type, with "/sums" where sums are torch's, and, where two members have connected
        # for themselves, the other one.
        self._connected: dict[tuple[str, int | None], _C.CountingCommunicator] = {}
        self._board: _C.FailureBoard | None = None
        self._calls = 0
        self._wait = Wait()
        self._ended: str | None = None

    def rank(self) -> int:
        """Rank of this process among the members."""
        return self._rank

    def nranks(self) -> int:
        """Number of members."""
        return len(self._members)

    def device_id(self) -> int:
        """Index of the device of this process on its node: its local rank."""
        return env.get_local_rank()

    def barrier(self) -> None:
        """Block until every member is here and this process's device has nothing left to do."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.run("barrier", torch.device("cpu"), _meet)

    def traffic(self) -> dict[str, int]:
        """Bytes and messages of this process so far, and the time that they took.

        ``bytes_sent``, ``bytes_received``, ``messages_sent``, ``messages_received`` and ``wire_ns``
        (nanoseconds in calls of the transport), summed over all connections. The few bytes of
        barriers and of connecting over gloo count.
        """
        return dict.fromkeys(TRAFFIC, 0) | total_traffic(list(self._connected.values()))

    def abort(self) -> None:
        """Make later calls raise, and end calls in flight where the transport can."""
        self._ended = "the communicator was aborted"
        self._abort_all(self._ended)

    def check_abort(self) -> bool:
        """Whether :meth:`abort` was called, or the process group was destroyed."""
        return self._ended is not None

    def close(self) -> None:
        """Drop the connections; later calls raise."""
        if self._ended is None:
            self._ended = "the process group was destroyed"
        self._connected.clear()
        self._board = None

    def run(
        self,
        name: str,
        device: torch.device,
        move: Callable[[_C.Communicator], None],
        *,
        sums_of_torch: bool = False,
    ) -> None:
        """Call ``move`` with the communicator of all members for ``device``; wait for its end."""
        self._calls += 1
        self._move(name, self._calls, device, None, move, sums_of_torch)

    def exchange(
        self, name: str, peer: int, sends: list[torch.Tensor], recvs: list[torch.Tensor]
    ) -> None:
        """Send tensors to member ``peer`` and receive others from it, all on one device.

        It is not a collective for errors, which count those: other members make no call here.
        """

        def move(connected: _C.Communicator) -> None:
            other = peer if connected.size == self.nranks() else 1 - connected.rank
            connected.exchange([(data, other) for data in sends], [(data, other) for data in recvs])

        self._move(name, self._calls + 1, (sends + recvs)[0].device, peer, move)

    def _move(
        self,
        name: str,
        call: int,
        device: torch.device,
        peer: int | None,
        move: Callable[[_C.Communicator], None],
        sums_of_torch: bool = False,
    ) -> None:
        if self._ended is not None:
            raise _C.BaguaError(f"{name}: {self._ended}")
        if watched.calls is not None and name != "barrier":
            watched.calls = [*watched.calls, self._ranks][:_MOST_WATCHED]
        if self._board is None:
            title = f"communicator '{self._name}'"
            self._board = self._connections.board(
                f"eager/{self._name}", title, "call", self._members
            )
        self._note(call, name, waits=True, watched=not self._connections.in_phase)
        try:
            with self._connections.waiting(self._wait, self._abort_all):
                connected = self._connect(device, peer, sums_of_torch)
                move(connected)
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
                    # NCCL fails on the device after its call has returned; the next call raises.
                    connected.exchange([], [])
        except KeyboardInterrupt:
            self._note(call, name, waits=False)
            self._ended = f"rank {self._rank} was interrupted in its {name}"
            if self._board is not None:
                self._board.publish(self._ended)
            raise
        except _C.BaguaError as error:
            self._note(call, name, waits=True)
            raise self._failure(name, call, peer, error) from error
        self._note(self._calls, f"after its {name}", waits=False)

    def _note(self, call: int, text: str, waits: bool, watched: bool = False) -> None:
        if self._board is None:
            return
        connections = self._connections
        # Until the next note: it refers to this object.
        never = partial(connections.give_up, self._wait, text) if watched else None
        self._board.beat(call, connections.told(text), waits, on_never=never)

    def _abort_all(self, reason: str) -> None:
        for connected in list(self._connected.values()):
            connected.abort(reason)

    def _connect(
        self, device: torch.device, peer: int | None, sums_of_torch: bool = False
    ) -> _C.CountingCommunicator:
        """Connections of all members, or of this one and ``peer`` if there are none of all yet.

        Connecting all is collective, so the two members of a message know alike.
        """
        label = self._connections.label(device)
        if sums_of_torch:
            label += "/sums"
        if self.nranks() == 2 or (label, None) in self._connected:
            peer = None
        if (label, peer) in self._connected:
            return self._connected[label, peer]
        purpose, members = f"eager/{self._name}/{label}", self._members
        if peer is not None:
            purpose += "/pair"
            members = [self._members[rank] for rank in sorted((self._rank, peer))]
        connected = self._connections.connect(purpose, device, members, sums_of_torch=sums_of_torch)
        if device.type == "cpu" or (device.type == "cuda" and cuda_transport() == "gloo"):
            # A member that only sends could be through, and gone, before another has connected to
            # it, which then would fail.
            _meet(connected)
        self._connected[label, peer] = connected
        return connected

    def _failure(
        self, name: str, call: int, peer: int | None, error: _C.BaguaError
    ) -> _C.BaguaError:
        """The error of a call, explained: Note [Diagnosis] in the C++ core."""
        text = self._wait.ended or str(error)
        if peer is not None:
            first, second = sorted((self._rank, peer))
            text = f"between ranks {first} and {second}: {text}"
        text = text.rstrip(".")
        seen = f"{name}, call {call} on rank {self._rank} of {self.nranks()}, failed: {text}. "
        if self._wait.never:
            self._ended = text
            return _C.BaguaError(seen.rstrip())
        seen += "Every member must make the same call with the same sizes and dtypes."
        if self._board is not None:
            self._board.publish(text, _C.Blame.MAYBE_OTHER)
            seen = self._board.diagnose(seen, call, "call", everyone=True, peer=peer)
        late = isinstance(error, _C.BaguaTimeoutError)
        return (_C.BaguaTimeoutError if late else _C.BaguaError)(seen)

    def __repr__(self) -> str:
        return f"Communicator({self._name}, rank {self._rank} of {self.nranks()})"


def _meet(connected: _C.Communicator) -> None:
    connected.all_reduce(torch.zeros(1, device="cpu"), _C.ReduceOp.SUM)


@dataclass(frozen=True)
class Island:
    """What a process stands for in a group of islands: see ``connect_islands``.

    ``number``: of the island, and this process's rank in the group. ``group``: the ranks of the
    island. ``store``: of all processes of all islands.
    """

    number: int
    group: BaguaProcessGroup
    store: c10d.Store


class BaguaProcessGroup:
    """A set of ranks that communicate.

    Attributes:
        ranks: the global ranks of the members, sorted; of a group of islands their numbers.
        island: that this process stands for, in a group of islands.
        stream: the CUDA stream asked for, or None.
        timeout: after which a member that does not answer is given up.
        waits_to_join: whether this process has come back to a job at work, and belongs to it from
            the wrap with an elastic algorithm on.
        membership: of this process in the group's generations, if an algorithm is elastic.
        admission: while ranks join: connections of the rank that gives its state, 0, and of those
            that join. None on the others.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        group_name: str,
        store: c10d.Store,
        timeout: timedelta,
        stream: Any = None,
        island: Island | None = None,
        connections: Connections | None = None,
    ) -> None:
        self.group_name = group_name
        self.island = island
        self.stream = stream
        self.timeout = timeout
        self.store = store
        self.waits_to_join = False
        self.admission: Connections | None = None
        self.membership: Membership | None = None
        self._communicators: dict[str, Communicator | CommMember] = {}
        self._connect(ranks, store, connections)
        _job.groups[group_name] = self

    def _connect(
        self, ranks: Sequence[int], store: c10d.Store, made: Connections | None = None
    ) -> None:
        self.ranks = sorted(ranks)
        self.connections = made or self._connections_of(self.ranks, store)
        self.connections.begin_beating()

    def _connections_of(self, ranks: list[int], store: c10d.Store) -> Connections:
        """New ones between ``ranks``, numbered in that order."""
        rank = ranks.index(self._own) if self._own in ranks else -1
        node = None if self.island is None else self.island.number
        return Connections(store, rank, ranks, self.timeout, node)

    @property
    def _own(self) -> int:
        return dist.get_rank() if self.island is None else self.island.number

    @property
    def torch_ranks(self) -> set[int]:
        """The members that are in torch's world, which is one island, by their rank there."""
        return set(self.ranks) if self.island is None else {dist.get_rank()}

    def replace_members(self, ranks: Sequence[int], store: c10d.Store) -> None:
        """Make the group these global ranks, with new connections. All of them call it.

        Communicators of eager collectives are closed: get new ones.
        """
        for communicator in self._communicators.values():
            if isinstance(communicator, Communicator):
                communicator.close()
        self._communicators.clear()
        self.connections.close()
        self.admission = None
        self.waits_to_join = False
        self._connect(ranks, store)

    @property
    def rank(self) -> int:
        """Rank of this process in the group; -1 if it is not a member."""
        return self.connections.rank

    @property
    def size(self) -> int:
        return len(self.ranks)

    def hierarchy(self, asked: Asked | None) -> Asked | bool:
        """``asked`` or, for None, whether there are several nodes and several ranks on one."""
        if asked is not None:
            return asked
        nodes = self.connections.node_of_ranks()
        return 1 < len(set(nodes)) < len(nodes)

    def known_nodes(self) -> tuple[list[int], int]:
        """Number of the node of each member, and this one.

        Raises BaguaTimeoutError where a member has not made the group after ten seconds.
        """
        return self.connections.node_of_ranks(_PATIENCE_FOR_NODES), self.rank

    def connect_some(self, name: str, ranks: Sequence[int]) -> Connections | None:
        """New connections of those global ``ranks``, numbered in that order; None on others."""
        if self._own not in ranks:
            return None
        return self._connections_of(list(ranks), c10d.PrefixStore(name, self.connections.store))

    def refuse_before_joining(self) -> None:
        """Raise BaguaError in a process that has come back to a job, and does not belong to it."""
        if self.waits_to_join:
            raise _C.BaguaError(
                "this process has come back to an elastic job, which it joins in bagua.wrap, with "
                "an algorithm that has elastic=True: before that it would communicate with nobody"
            )

    def get_global_communicator(self) -> Communicator | CommMember:
        """All members. Ranks outside of the group get ``CommMember.NON_COMM_MEMBER``."""
        return self._communicator("global", lambda: list(range(self.size)))

    def get_intra_node_communicator(self) -> Communicator | CommMember:
        """The members on this process's node; outside of the group ``CommMember.NON_COMM_MEMBER``.

        All members call it when it is first used.
        """
        return self._communicator("intra", lambda: self.connections.own_node())

    def get_inter_node_communicator(self) -> Communicator | CommMember:
        """The lowest member rank of each node; all others get ``CommMember.NON_COMM_MEMBER``.

        All members call it when it is first used.
        """
        return self._communicator("inter", lambda: self.connections.leaders())

    def _communicator(
        self, name: str, members_of: Callable[[], list[int]]
    ) -> Communicator | CommMember:
        self.refuse_before_joining()
        if name not in self._communicators:
            members = [] if self.rank < 0 else members_of()
            if self.rank in members:
                communicator = Communicator(self.connections, name, members, self.stream)
                close_at_exit(communicator)
                self._communicators[name] = communicator
            else:
                self._communicators[name] = CommMember.NON_COMM_MEMBER
        return self._communicators[name]

    def __repr__(self) -> str:
        return f"BaguaProcessGroup(name={self.group_name!r}, ranks={self.ranks})"


def set_default_group(group: BaguaProcessGroup | None) -> None:
    _job.everyone = group
    env.set_nodes(None if group is None else group.known_nodes)
    speak_through(None if group is None else group.connections.store)


def is_initialized() -> bool:
    """Whether ``init_process_group`` has been called."""
    return _job.everyone is not None


def get_default_group() -> BaguaProcessGroup:
    """The group of all ranks, or RuntimeError before ``init_process_group``."""
    if _job.everyone is None:
        raise RuntimeError(
            "bagua is not initialised: call bagua.init_process_group() before bagua.wrap and "
            "before any communication"
        )
    return _job.everyone


def get_communicator(group_name: str, comm_name: str) -> Communicator | CommMember:
    """A communicator, ``"global"``, ``"inter"`` or ``"intra"``, of the group of that name.

    Raises ValueError where there is no such group (any more), or no such kind of communicator.
    """
    group = _job.groups.get(group_name)
    if group is None:
        known = [*_job.groups]
        raise ValueError(f"get_communicator: there is no group '{group_name}', only {known}")
    getters = {
        "global": group.get_global_communicator,
        "inter": group.get_inter_node_communicator,
        "intra": group.get_intra_node_communicator,
    }
    if comm_name not in getters:
        raise ValueError(f"get_communicator: '{comm_name}' is none of {list(getters)}")
    return getters[comm_name]()


#: What collectives take as ``comm=``; None and ``CommMember.WORLD``: all ranks.
Comm: TypeAlias = Communicator | CommMember | None


def member_of(comm: Comm) -> Communicator | None:
    """The communicator that a collective's ``comm=`` stands for; None: nothing to do here."""
    if comm is None or comm is CommMember.WORLD:
        comm = get_default_group().get_global_communicator()
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    if not isinstance(comm, Communicator):
        raise TypeError(
            "comm must be None or what get_global_communicator(), get_inter_node_communicator() or "
            f"get_intra_node_communicator() of a BaguaProcessGroup returned, not {comm!r}"
        )
    return comm
