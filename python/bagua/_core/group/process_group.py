"""A set of ranks that communicate, its communicators, and the group of all ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua import _C
from bagua._core.group.communicator import CommMember, Communicator
from bagua._core.group.connections import Connections
from bagua._core.group.membership import Membership

__all__ = [
    "BaguaProcessGroup",
    "Hierarchy",
    "Island",
    "close_all",
    "close_at_exit",
    "get_communicator",
    "get_default_group",
    "is_initialized",
    "member_of",
    "set_default_group",
]


#: False: among all ranks. True: among the nodes' leaders. "sharded": each rank of a node takes part
#: between the nodes, with a share of the bucket.
Hierarchy = bool | Literal["sharded"]
Asked = TypeVar("Asked", bound=Hierarchy)


class Closable(Protocol):
    """Resource that is closed when the interpreter or the process group ends.

    It may also have ``announce_end()``, called on all resources before the first is closed where
    the program ends well, and ``end_with_group()``, called instead of ``close()``.
    """

    def close(self) -> None: ...


_live: weakref.WeakSet[Closable] = weakref.WeakSet()
_groups: weakref.WeakValueDictionary[str, BaguaProcessGroup] = weakref.WeakValueDictionary()
_default_group: BaguaProcessGroup | None = None


def close_at_exit(resource: Closable) -> None:
    """Have ``resource.close()`` called before the process group goes away."""
    _live.add(resource)


def close_all() -> None:
    """Close everything that was given to :func:`close_at_exit`, and forget all groups.

    Raises:
        BaguaError: of a resource; the others are closed too.
    """
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
    for group in list(_groups.values()):
        group.connections.publish_exit()
    _groups.clear()
    set_default_group(None)
    if failures:
        raise failures[0]


@dataclass(frozen=True)
class Island:
    """What a process stands for in a group of islands: see ``connect_islands``.

    Attributes:
        number: of the island, which is this process's rank in the group.
        group: the ranks of the island; this process meets those of its rank in other islands.
        store: of all processes of all islands.
    """

    number: int
    group: BaguaProcessGroup
    store: c10d.Store


class BaguaProcessGroup:
    """A set of ranks that communicate.

    Attributes:
        ranks: the global ranks of the members, sorted; of a group of islands their numbers.
        island: that this process stands for, in a group of islands.
        group_name: name of the group in the store.
        stream: the CUDA stream asked for, or None.
        timeout: after which a member that does not answer is given up.
        store: of the group.
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
        self._connect(ranks, store)
        _groups[group_name] = self

    def _connect(self, ranks: Sequence[int], store: c10d.Store) -> None:
        self.ranks = sorted(ranks)
        self.connections = self._connections_of(self.ranks, store)

    def _connections_of(self, ranks: list[int], store: c10d.Store) -> Connections:
        """New ones between ``ranks``, numbered in that order."""
        rank = ranks.index(self._own) if self._own in ranks else -1
        node = None if self.island is None else self.island.number
        return Connections(store, rank, ranks, self.timeout, node)

    @property
    def _own(self) -> int:
        """This process among :attr:`ranks`."""
        return dist.get_rank() if self.island is None else self.island.number

    @property
    def torch_ranks(self) -> set[int]:
        """The members that are in torch's world, which is one island, by their rank there."""
        return set(self.ranks) if self.island is None else {dist.get_rank()}

    def replace_members(self, ranks: Sequence[int], store: c10d.Store) -> None:
        """From now on the group is these global ranks, with new connections over ``store``.

        All of them call it. Communicators of eager collectives are closed: get new ones.
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
        """Rank of this process in the group; -1 if it is no member."""
        return self.connections.rank

    @property
    def size(self) -> int:
        return len(self.ranks)

    def hierarchy(self, asked: Asked | None) -> Asked | bool:
        """``hierarchical`` of an algorithm: ``asked`` or, for None, what suits the nodes.

        Returns:
            For None, equal on all ranks: whether there are several nodes, and several ranks on one.
        """
        if asked is not None:
            return asked
        nodes = self.connections.node_of_ranks()
        return 1 < len(set(nodes)) < len(nodes)

    def connect_some(self, name: str, ranks: Sequence[int]) -> Connections | None:
        """New connections of those global ``ranks``, numbered in that order; None on others."""
        if self._own not in ranks:
            return None
        return self._connections_of(list(ranks), c10d.PrefixStore(name, self.connections.store))

    def refuse_before_joining(self) -> None:
        """Raise BaguaError in a process that has come back to a job, and does not belong to it."""
        if self.waits_to_join:
            raise _C.BaguaError(
                "this process has come back to an elastic job, which it joins in with_bagua, with "
                "an algorithm that has elastic=True: before that it would communicate with nobody"
            )

    def get_global_communicator(self) -> Communicator | CommMember:
        """All members. Ranks outside of the group get ``CommMember.NON_COMM_MEMBER``."""
        return self._communicator("global", lambda: list(range(self.size)))

    def get_intra_node_communicator(self) -> Communicator | CommMember:
        """The members on this process's node. All members call it when it is first used.

        Ranks outside of the group get ``CommMember.NON_COMM_MEMBER``.
        """
        return self._communicator(
            "intra", lambda: _C.node_members(self.connections.node_of_ranks(), self.rank)
        )

    def get_inter_node_communicator(self) -> Communicator | CommMember:
        """The lowest member rank of each node. All members call it when it is first used.

        All other ranks get ``CommMember.NON_COMM_MEMBER``.
        """
        return self._communicator("inter", lambda: _C.leaders(self.connections.node_of_ranks()))

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
    """Make ``group`` the one that is used where no group is named."""
    global _default_group
    _default_group = group


def is_initialized() -> bool:
    """Whether ``init_process_group`` has been called."""
    return _default_group is not None


def get_default_group() -> BaguaProcessGroup:
    """The group of all ranks.

    Raises:
        RuntimeError: before ``init_process_group``.
    """
    if _default_group is None:
        raise RuntimeError(
            "bagua is not initialised: call bagua.init_process_group() before with_bagua and "
            "before any communication"
        )
    return _default_group


def get_communicator(group_name: str, comm_name: str) -> Communicator | CommMember:
    """A communicator of the group called ``group_name`` (``BaguaProcessGroup.group_name``).

    Args:
        comm_name: ``"global"``, ``"inter"`` or ``"intra"``.

    Raises:
        ValueError: there is no such group (any more), or no such kind of communicator.
    """
    group = _groups.get(group_name)
    if group is None:
        raise ValueError(f"get_communicator: there is no group '{group_name}', only {[*_groups]}")
    getters = {
        "global": group.get_global_communicator,
        "inter": group.get_inter_node_communicator,
        "intra": group.get_intra_node_communicator,
    }
    if comm_name not in getters:
        raise ValueError(f"get_communicator: '{comm_name}' is none of {list(getters)}")
    return getters[comm_name]()


def member_of(comm: Communicator | CommMember | None) -> Communicator | None:
    """The communicator that a collective's ``comm=`` stands for; None: nothing to do here.

    Raises:
        RuntimeError: before ``init_process_group``.
        TypeError: ``comm`` is not a communicator.
    """
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
