"""Makes the communicators of a group: each with separate connections over the job's store."""

from __future__ import annotations

import collections
import functools
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import queue
import resource
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set as AbstractSet
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.rendezvous import lines_in, number_in
from bagua._core.group.warn import warn, warn_here

#: Names of what a communicator has moved.
MOVED = ("bytes_sent", "bytes_received", "messages_sent", "messages_received")
#: Names of all counters of a communicator.
TRAFFIC = (*MOVED, "shm_bytes", "wire_ns")

_NCCL = "libnccl.so.2"

_FAR_US = env.FAR_US

#: Of a rank among so many: the ranks with which it exchanges messages, as they do with it.
Peers = Callable[[int, int], AbstractSet[int]]

#: The main thread's communicator of CPU tensors, over which all members then make a sum.
_MAIN = "main/cpu"

#: Where a transport listens, as its rank tells it to others.
_MOST_ADDRESS_BYTES = 1024

#: Open files that a transport takes beside its connections.
_FILES_BESIDE = 8
#: The least limit of open files that is proposed.
_ENOUGH_FILES = 1024

#: Seconds between two questions whether a call that connects is to be given up.
_BETWEEN_QUESTIONS_S = 0.1

_log = logging.getLogger("bagua")


def fingerprint(lines: list[str]) -> int:
    """64 bits that differ for different descriptions."""
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def total_traffic(
    communicators: Iterable[_C.CountingCommunicator],
) -> collections.Counter[str]:
    """Sums of ``CountingCommunicator.traffic()``, by the names in ``TRAFFIC``."""
    total = collections.Counter[str]()
    for communicator in communicators:
        total.update(communicator.traffic())
    return total


def add_traffic(table: dict[str, dict[str, int]], purpose: str, traffic: dict[str, int]) -> None:
    entry = table.setdefault(purpose, dict.fromkeys(TRAFFIC, 0))
    for key in TRAFFIC:
        entry[key] += traffic[key]


def by_value(values: Sequence[Hashable]) -> list[list[int]]:
    """The members that have one of ``values``, ascending, for each of them; the first ascend."""
    alike: dict[Hashable, list[int]] = {}
    for member, value in enumerate(values):
        alike.setdefault(value, []).append(member)
    return list(alike.values())


def by_node(numbers: Sequence[int]) -> list[list[int]]:
    """The members of each node, ascending. The first leads its node, and leaders ascend.

    ``numbers[m]``: number of the node of member m.
    """
    return by_value(numbers)


def everyone(rank: int, size: int) -> set[int]:
    """Peers of messages from each rank to each."""
    return set(range(size)) - {rank}


def on_ring(rank: int, size: int) -> set[int]:
    """Peers of sums, as gloo makes them, and of messages to both neighbours."""
    return {(rank - 1) % size, (rank + 1) % size} - {rank}


def by_doubling(rank: int, size: int) -> set[int]:
    """Peers of sums, of broadcasts from any rank, and of small messages that reach all ranks."""
    strides = [1 << bit for bit in range((size - 1).bit_length())]
    return {(rank + way * stride) % size for stride in strides for way in (-1, 1)} - {rank}


def of_agreements(rank: int, size: int) -> set[int]:
    """Peers of ranks that compare small records: Note [Records of many ranks]."""
    direct = size <= _C.MOST_RANKS_TOLD_DIRECTLY
    return everyone(rank, size) if direct else by_doubling(rank, size)


def cuda_transport() -> str:
    """Transport of CUDA tensors; over "gloo", through host memory, ranks may share a GPU."""
    comm = env.get_comm()
    return comm if comm in ("nccl", "c10d", "gloo") else "nccl" if _C.has_nccl else "c10d"


class Wait:
    """Waits of one thread for other ranks, one at a time, each of which another thread may end.

    ``ended``: why it did, else empty. ``never``: whether because a rank never comes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abort: Callable[[str], None] | None = None
        self.ended = ""
        self.never = False
        self._told = ""

    def is_told_again(self, news: str) -> bool:
        """Whether this wait has been told so before: a rank may be about to fail alike."""
        before, self._told = self._told, news
        return before == news

    def begin(self, abort: Callable[[str], None]) -> None:
        with self._lock:
            self._abort, self.ended, self.never, self._told = abort, "", False, ""

    def over(self) -> None:
        with self._lock:
            self._abort = None

    def end(self, reason: str, *, never: bool = False) -> None:
        """End the wait, unless it is over: what comes next is not to be aborted."""
        with self._lock:
            if self._abort is not None:
                self.ended, self.never = reason, never
                self._abort(reason)


class Connections:
    """Connections between the members of a group, over prefixes of its store.

    ``dist.new_group`` would have to be called by non-members too, in one order on all ranks.
    ``node``: number of this member's node, by default the launcher's.
    """

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        ranks: list[int],
        timeout: timedelta,
        node: int | None = None,
    ) -> None:
        self.store = store
        self.rank = rank
        self.ranks = ranks
        self.timeout = timeout
        self._main: dict[str, _C.CountingCommunicator] = {}
        self._main_sockets: _C.OpenedSockets | None = None
        #: Of the two members that are farthest apart, as all members know it since they last agreed
        #: on something. 0: not known, or on one host.
        self.round_trip_us = 0
        #: Of TCP, between members that are far; empty: not known.
        self.congestion_control = ""
        self._devices: list[torch.device] = []
        self._nodes: list[int] | None = None
        self._told_why_unshared = False
        # Why members of one node share no memory, as all of them were told at their first meeting;
        # of two kinds of sums.
        self._unshared: dict[tuple[bool, tuple[int, ...]], str] = {}
        self._phases = 0
        self._in_phase = False
        self._act = ""
        self._wait = Wait()
        self._board: _C.Board | None = None
        self._when_dropped: weakref.finalize[..., Connections] | None = None
        self._phase_seat: _C.FailureBoard | None = None
        self._wraps = 0
        self._node = env.get_node_number() if node is None else node
        self._came: set[str] = set()  # to meetings that were left by an exception
        self._waits_in: _C.Gathering | None = None  # the main thread
        #: Of rank 0: meetings of all members whose keys the next sum deletes.
        self._left: list[_C.Gathering] = []
        #: By name and members: what was connected beside something else.
        self._made: dict[tuple[str, tuple[int, ...]], Any] = {}
        if rank >= 0 and self.size > 1:  # before anyone can wait for it
            self._meeting_of_nodes = self._meeting("nodes", list(range(self.size)))
            self._meeting_of_nodes.bring(str(self._node))

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def are_far(self) -> bool:
        """Whether a message between members takes long, so that their number matters."""
        return self.round_trip_us >= _FAR_US

    @property
    def in_phase(self) -> bool:
        """Whether the main thread is in a collective phase, whose seat tells its waits."""
        return self._in_phase

    def next_wrap(self) -> str:
        """A name for the next wrap, equal on all members."""
        self._wraps += 1
        return f"wrap{self._wraps}"

    @contextmanager
    def collective_phase(self, what: str) -> Iterator[None]:
        """Let all members do ``what`` together; if it fails, the error names the missing ranks.

        A phase inside another one is part of it. Ranks outside the group do nothing. Main thread
        only.
        """
        seat = None if self._in_phase or self.rank < 0 else self._seat_of_phases()
        if seat is None:
            yield
            return
        self._phases += 1
        what, wait = self.told(what), self._wait
        ends, never = partial(self._end_phase, wait, what), partial(self.give_up, wait, what)
        wait.begin(self.abort)
        seat.beat(self._phases, what, True, ends, never)
        self._in_phase = True
        try:
            yield
        except _C.BaguaMismatchError:
            raise
        except KeyboardInterrupt:
            seat.publish(f"{what}: rank {self.rank} was interrupted")
            raise
        except (_C.BaguaError, dist.DistError) as error:
            wait.over()  # an abort would end the communicators for what comes next
            seat.publish(str(error), _C.Blame.MAYBE_OTHER)
            kind = type(error) if isinstance(error, _C.BaguaError) else _C.BaguaError
            seen = f"{what}, rank {self.rank} of {self.size}: {wait.ended or error}"
            if wait.never:
                raise _C.BaguaError(seen) from error
            raise kind(seat.diagnose(seen, self._phases, "", everyone=True)) from error
        finally:
            wait.over()
            self._in_phase = False
            seat.beat(self._phases, what)

    @contextmanager
    def act(self, name: str) -> Iterator[None]:
        """Have the calls inside be told as those of ``name``, which every member calls."""
        before, self._act = self._act, name
        try:
            yield
        finally:
            self._act = before

    def told(self, call: str) -> str:
        """A call, with the act that it is part of."""
        return f"{call} in {self._act}" if self._act else call

    @contextmanager
    def waiting(self, wait: Wait, abort: Callable[[str], None]) -> Iterator[None]:
        """Have ``wait`` end what waits inside, by ``abort`` or while it connects.

        In a phase it is the phase that is waited for.
        """
        if self._in_phase:
            yield
            return

        def end(reason: str) -> None:
            abort(reason)
            self._end_meeting(reason)

        before, self._wait = self._wait, wait
        wait.begin(end)
        try:
            yield
        finally:
            wait.over()
            self._wait = before

    def give_up(self, wait: Wait, call: str, reason: str) -> None:
        """End a wait for a member that never comes to the call. From any thread."""
        wait.end(
            f"{reason}. Every rank of the group must call {self._act or call}: look for a "
            "condition such as `if rank == 0` around it.",
            never=True,
        )

    def _end_phase(self, wait: Wait, what: str, news: str) -> None:
        """On a thread of the board: another member has failed in this phase, or exited."""
        member, exited, _ = news.partition(" exited after ")
        if exited:
            self.give_up(wait, what, f"{member} has exited, and takes no part")
        elif wait.is_told_again(news):
            wait.end(news)

    def _seat_of_phases(self) -> _C.FailureBoard | None:
        if self._phase_seat is None:
            self._phase_seat = self.board("phase", "", per_round=True)
        return self._phase_seat

    def begin_beating(self) -> None:
        """Let the other members see that this one lives."""
        if self.rank >= 0 and (seat := self._seat_of_phases()) is not None:
            seat.beat(self._phases, "init_process_group")

    def publish_exit(self, process_ends: bool = False) -> None:
        """Tell the members that this one takes part in no further phase. Never raises."""
        if self._board is not None and (seat := self._seat_of_phases()) is not None:
            seat.publish_exit(self._phases)
            self._board.leave(process_ends)

    def _meeting(self, name: str, members: list[int]) -> _C.Gathering:
        """A meeting of ``members`` in the store."""
        key, seconds = _key_of(name, members), self.timeout.total_seconds()
        place = members.index(self.rank), len(members)
        return _C.Gathering(self.store, key, *place, seconds, key in self._came)

    @contextmanager
    def _met(
        self, name: str, members: list[int], begun: _C.Gathering | None = None
    ) -> Iterator[_C.Gathering]:
        """A meeting that is held inside, and that the end of a wait ends."""
        meeting, key = begun or self._meeting(name, members), _key_of(name, members)
        self._came.add(key)
        self._waits_in = meeting
        try:
            yield meeting
        except _C.BaguaTimeoutError as error:
            raise self._not_connected(members.index(self.rank), len(members), error) from error
        finally:
            self._waits_in = None
        self._came.discard(key)

    def _gather(self, name: str, members: list[int], text: str) -> list[bytes]:
        """``text`` of each of ``members``, which all come here."""
        with self._met(name, members) as meeting:
            meeting.bring(text)
            return meeting.texts()

    def connecting(self) -> Callable[[], str]:
        """Tells why a call that connects from now on is to be given up; empty: not yet.

        gloo itself waits five times as long for each peer, and hears of no failure.
        """
        wait, deadline = self._wait, time.monotonic() + self.timeout.total_seconds()

        def hopeless() -> str:
            if wait.ended:
                return wait.ended
            late = time.monotonic() > deadline
            return f"timed out after {self.timeout.total_seconds():g} s" if late else ""

        return hopeless

    def abort(self, reason: str) -> None:
        """End what the main thread waits for in a communicator: it raises ``reason``."""
        for communicator in list(self._main.values()):
            communicator.abort(reason)
        self._end_meeting(reason)

    def _end_meeting(self, reason: str) -> None:
        if (meeting := self._waits_in) is not None:
            meeting.give_up(reason)

    def reduce_numbers(self, what: str, op: _C.ReduceOp, *numbers: int) -> list[int]:
        """The minimum, maximum or sum over all members of each of ``numbers``."""
        values = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if self.size > 1:
            with self.collective_phase(what):
                self.main_communicator("cpu").all_reduce(values, op)
            self.forget_left()  # from where all members have come here
        return [int(value) for value in values]

    def gather_numbers(self, what: str, own: int) -> list[int]:
        """``own`` of each member."""
        alone = (own if rank == self.rank else 0 for rank in range(self.size))
        return self.reduce_numbers(what, _C.ReduceOp.SUM, *alone)

    def main_communicator(self, device: torch.device | str) -> _C.CountingCommunicator:
        """The communicator that belongs to the main thread, for tensors of ``device``."""
        label = self.label(device)
        if label not in self._main:
            if label == "cpu":
                self._main_sockets = _C.OpenedSockets()
            self._main[label] = self.connect(f"main/{label}", device, peers=by_doubling)
        return self._main[label]

    def label(self, device: torch.device | str) -> str:
        """A device's name on all members: its type, and a number from the second of that type on.

        Devices of members have different indices, and are first used in the same order.
        """
        device = torch.device(device)
        if device not in self._devices:
            self._devices.append(device)
        alike = [known for known in self._devices if known.type == device.type]
        number = alike.index(device)
        return f"{device.type}.{number}" if number else device.type

    def close(self) -> None:
        """Drop the main thread's communicators: other connections replace these."""
        self._main.clear()
        if self._when_dropped is not None:
            self._when_dropped.detach()  # who is lost or joins has deleted these keys

    def main_traffic(self) -> dict[str, int]:
        return total_traffic(self._main.values())

    def whereabouts(self) -> str:
        """This member and, where nodes have been asked for, its node: for logging."""
        nodes = "" if self._nodes is None else f", {len(set(self._nodes))} node(s)"
        return f"rank {self.rank} of {self.size}{nodes}"

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
        """A new communicator over ``members`` (ranks in this group; default: all).

        ``beside``: names of communicators with fewer peers or as many that all members connect
        next, before a sum: where gloo connects far members, it connects these at the same time.
        ``nodes_known``: to all members. ``peers``: with whom it will exchange messages, by ranks
        among ``members``: gloo connects no others where they are many. ``sums_of_torch``:
        reductions of CPU tensors have the bits of torch's, which gloo makes, unless BAGUA_COMM
        names shared memory.
        """
        device = torch.device(device)
        if self.rank < 0:
            raise RuntimeError(f"this process is not a member of the group with ranks {self.ranks}")
        members = list(range(self.size)) if members is None else members
        if len(members) == 1:
            alone = _C.ThreadHub(1, self.timeout.total_seconds())
            return _C.CountingCommunicator(_C.ThreadCommunicator(alone, 0))
        if self.are_far:  # short paths lead to every rank
            peers = everyone
        start = time.monotonic()
        sockets = _C.OpenedSockets()
        connected: _C.Communicator
        through = cuda_transport() if device.type == "cuda" else "c10d"
        if through == "nccl":
            connected = self._nccl(name, device, members)
        elif through == "gloo":
            gloo = _C.C10dCommunicator(self.backend(name, "cpu", members, peers))
            connected = _C.HostCommunicator(gloo)
        elif device.type == "cpu":
            connected = self._on_cpu(name, members, sums_of_torch, nodes_known, peers, beside)
        else:
            self._gather(f"{name}/here", members, "")
            connected = _C.C10dCommunicator(self.backend(name, device.type, members))
        sockets.give_up_after(self.timeout.total_seconds())
        _log.debug(
            "%s: connected '%s' (%s) to ranks %s of the group in %.0f ms",
            self.whereabouts(),
            name,
            device,
            members,
            1000 * (time.monotonic() - start),
        )
        if self.are_far:
            connected.shorten_paths()
            self._control_congestion(sockets)
        return _C.CountingCommunicator(connected)

    def connect_nodes(
        self, name: str, device: torch.device | str, peers: Peers
    ) -> tuple[_C.CountingCommunicator, _C.CountingCommunicator | None]:
        """This member's node and, on its leader, the leaders of several nodes. All call it.

        ``peers``: of a leader, see ``connect``.
        """
        leaders = self.leaders()
        several = {"leaders": leaders} if len(leaders) > 1 else {}
        node, between = self._connect_own_node(name, device, several, peers)
        return node, between[0] if between else None

    def connect_shares(
        self, name: str, device: torch.device | str, peers: Peers
    ) -> tuple[_C.CountingCommunicator, list[_C.CountingCommunicator | None]]:
        """New communicators over this member's node and, for each share of a bucket, over the
        members that have it: in a node of n members share s is of member s mod n. There is one
        share for each member of the largest node, and none where there is one node. None for shares
        that this member has not. ``peers``: of the members of a share. Called by all members."""
        members = by_node(self.node_of_ranks())
        most = max(map(len, members)) if len(members) > 1 else 0
        shares = {str(s): [node[s % len(node)] for node in members] for s in range(most)}
        return self._connect_own_node(f"{name}/shares", device, shares, peers)

    def _connect_own_node(
        self, name: str, device: torch.device | str, between: dict[str, list[int]], peers: Peers
    ) -> tuple[_C.CountingCommunicator, list[_C.CountingCommunicator | None]]:
        """This member's node, and those groups of ``between`` that it is in. All call it."""
        mine = self.own_node()
        device = torch.device(device)
        if device.type == "cuda" and cuda_transport() == "nccl" and self.size > 1:
            # NCCL connects once, and hands what it has found to the smaller groups.
            everyone = self._nccl(f"{name}/nodes", device, list(range(self.size)))
            split = [everyone.split(ranks) for ranks in (mine, *between.values())]
            node, *others = [None if one is None else _C.CountingCommunicator(one) for one in split]
            assert node is not None  # this member is of its node
            return node, others
        # In one order, or members of several groups would wait for each other.
        return self.connect(f"{name}/node{mine[0]}", device, mine), [
            self.connect(f"{name}/{group}", device, ranks, nodes_known=True, peers=peers)
            if self.rank in ranks
            else None
            for group, ranks in between.items()
        ]

    def _nccl(self, name: str, device: torch.device, members: list[int]) -> _C.NcclCommunicator:
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        store = self._store_of(name, members)
        rank, timeout = members.index(self.rank), self.timeout.total_seconds()
        # Transports wait mutely, and keep the store: all members are to be here before.
        gpus = self._gather(f"{name}/gpus", members, gpu_identity(device))
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            warn(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams of a GPU one queue, in which "
                "collectives of bagua and of torch, whose order differs between ranks, can wait "
                "for each other for ever. Unset it, or set it to 8, on every rank."
            )
        try:
            return _C.NcclCommunicator(nccl_library(), store, rank, len(members), device, timeout)
        except _C.BaguaTimeoutError:
            raise
        except _C.BaguaError as error:
            sharing = next((alike for alike in by_value(gpus) if len(alike) > 1), [])
            if not sharing:
                raise
            raise _C.BaguaError(
                f"ranks {', '.join(str(members[other]) for other in sharing)} use one GPU, and "
                f"NCCL takes one rank for each; rank {self.rank}'s tensors are on {device}. Call "
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the model is moved to '
                '"cuda", on every rank; where ranks are to share a GPU, set BAGUA_COMM=gloo'
            ) from error

    def _on_cpu(
        self,
        name: str,
        members: list[int],
        sums_of_torch: bool,
        nodes_known: bool,
        peers: Peers,
        beside: Sequence[str],
    ) -> _C.Communicator:
        """Memory that the members share where all of them want it and can, or gloo."""
        comm = env.get_comm()
        refusal = ""
        if comm == "gloo":
            refusal = "BAGUA_COMM is gloo"
        elif sums_of_torch and comm not in ("shm", "auto"):
            refusal = "sums as torch's"
        # All members get the same: a communicator, or why there is none though they are on a node.
        reason = self._why_apart(members) if nodes_known or len(members) == self.size else ""
        on_one_node, known = not reason, (sums_of_torch, tuple(members))
        if on_one_node and not (reason := self._unshared.get(known, "")):
            with self._met(f"{name}/shm", members) as meeting:
                shared, reason, on_one_node = meeting.share_memory(self._node, refusal)
            if shared is not None:
                return shared
            self._unshared[known] = reason
        if comm == "shm":
            raise _C.BaguaError(
                f"BAGUA_COMM=shm: ranks {members} of the group cannot share memory: {reason}. "
                "Unset BAGUA_COMM, and gloo connects ranks that share none."
            )
        told = bool(refusal) or not on_one_node or self._told_why_unshared
        if not told and self.rank == members[0]:
            self._told_why_unshared = True
            _log.info("ranks %s use gloo instead of shared memory: %s", members, reason)
        if not self.are_far or len(members) < self.size:
            beside = ()
        return _C.C10dCommunicator(self.backend(name, "cpu", members, peers, beside))

    def _why_apart(self, members: list[int]) -> str:
        """Why ``members`` share no memory: they are on several nodes; empty: they are on one."""
        nodes = [self.node_of_ranks()[member] for member in members]
        for number, node in enumerate(nodes):
            if node != nodes[0]:
                return f"ranks 0 and {number} are on nodes {nodes[0]} and {node}"
        return ""

    def _not_connected(self, rank: int, size: int, error: RuntimeError) -> _C.BaguaError:
        late = _C.is_timeout_of_transport(str(error)) or isinstance(error, _C.BaguaTimeoutError)
        return (_C.BaguaTimeoutError if late else _C.BaguaError)(
            f"rank {rank} of {size} could not connect to the others within "
            f"{self.timeout.total_seconds():g} s: {error}. Check that every rank reached this "
            "call, and that GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME name the interface that "
            "the ranks share."
        )

    def _store_of(self, name: str, members: list[int]) -> c10d.Store:
        return c10d.PrefixStore(_key_of(name, members), self.store)

    def backend(
        self,
        name: str,
        device_type: str,
        members: list[int],
        peers: Peers = everyone,
        beside: Sequence[str] = (),
    ) -> Any:
        """A new c10d backend over ``members`` (ranks in this group, this process among them).

        ``beside``: see ``connect``.
        """
        if (made := self._made.pop((name, tuple(members)), None)) is not None:
            return made
        store = self._store_of(name, members)
        rank, size = members.index(self.rank), len(members)
        others = sorted(peers(rank, size))
        if device_type == "cpu":
            check_open_files((1 + len(beside)) * len(others))
        try:
            if device_type == "cpu":
                names = [name, *beside]
                for one, made in zip(names, self._gloo(names, members, others), strict=True):
                    self._made[one, tuple(members)] = made
                return self._made.pop((name, tuple(members)))
            if device_type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self.timeout
                return dist.ProcessGroupNCCL(store, rank, size, options)
        except RuntimeError as error:
            raise self._not_connected(rank, size, error) from error
        creator = dist.Backend._plugins.get(dist.get_backend().upper())
        if creator is None:
            raise NotImplementedError(
                f"no communication backend for device type '{device_type}'; move the model to CPU "
                "(gloo) or CUDA (NCCL)"
            )
        return creator.creator_fn(store, rank, size, self.timeout)

    def _gloo(self, names: list[str], members: list[int], others: list[int]) -> list[Any]:
        """Backends of gloo under ``names``, connected to ``others`` at the same time."""
        rank, size, hopeless = members.index(self.rank), len(members), self.connecting()
        direct = len(names) > 1 and size <= _C.MOST_RANKS_TOLD_DIRECTLY
        sums_next = names[0] == _MAIN or len(names) > 1  # of all members, or a failure
        with self._met(f"{names[0]}/gloo", members) as meeting:
            try:
                most = _MOST_ADDRESS_BYTES * len(names)
                exchange = partial(self._exchange_texts, most) if direct else None
                stores = meeting.stores(len(names), exchange)
                made = _gloo(stores, rank, size, others, self.timeout, hopeless)
            finally:
                meeting.give_up("this rank connects no more")
        if not direct and not sums_next:
            meeting.finish()
        elif not direct:
            self._leave(meeting)
        return made

    def _leave(self, meeting: _C.Gathering) -> None:
        """End a meeting of all members, whose keys a far rank would delete one round trip each."""
        if self.rank == 0:
            self._left.append(meeting)

    def forget_left(self) -> None:
        """Delete the keys of meetings, all of whose members are known to have left."""
        while self._left:
            self._left.pop().forget()

    def _exchange_texts(self, most: int, own: bytes) -> list[bytes]:
        """``own`` of each member, at most ``most`` bytes: by one message to each, not the store."""
        if len(own) > most:
            raise _C.BaguaError(f"rank {self.rank} listens at addresses of {len(own)} bytes")
        others = [member for member in range(self.size) if member != self.rank]
        records = list(torch.zeros(self.size, 8 + most, dtype=torch.uint8, device="cpu"))
        records[self.rank][:8].view(torch.int64).fill_(len(own))
        records[self.rank][8 : 8 + len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        sends = [(records[self.rank], other) for other in others]
        self.main_communicator("cpu").exchange(sends, [(records[other], other) for other in others])
        sizes = [int(record[:8].view(torch.int64)) for record in records]
        texts = (record[8 : 8 + size] for record, size in zip(records, sizes, strict=True))
        return [bytes(text.tolist()) for text in texts]

    def forget_unused(self) -> None:
        """Drop what was connected beside something else, and that nothing has asked for."""
        self._made.clear()

    def board(
        self,
        name: str,
        title: str,
        unit: str = "round",
        members: list[int] | None = None,
        *,
        per_round: bool = False,
    ) -> _C.FailureBoard | None:
        """A seat for ``members`` (default: all) at the group's board; None for a single rank.

        ``name``: short, equal on all members. ``title``: what the others are told, with ``unit``.
        """
        members = list(range(self.size)) if members is None else members
        if len(members) == 1:
            return None
        if self._board is None:
            self._board = _C.Board(
                c10d.PrefixStore("board", self.store),
                self.rank,
                self.size,
                straggler_after_s=env.get_straggler_seconds(),
                on_straggler=warn_here,
            )
            # A group that is dropped while the job goes on leaves no heartbeats in the store.
            self._when_dropped = weakref.finalize(self, _leave, self._board, os.getpid())
            self._when_dropped.atexit = False
        return self._board.seat(name, members, title=title, unit=unit, per_round=per_round)

    def incarnation(self) -> int:
        """A random number that the members share, and that no other call of theirs returns."""
        own = secrets.randbits(63) if self.rank == 0 else 0
        return self.reduce_numbers("agreeing on a number", _C.ReduceOp.MAX, own)[0]

    def node_of_ranks(self, patience: timedelta | None = None) -> list[int]:
        """Node number of every member, as each gave it to the store when it made the group.

        ``patience``: for members that have not made it yet; default the group's timeout.
        """
        if self.size == 1:
            return [self._node]
        if self._nodes is None:
            with self._met("nodes", list(range(self.size)), self._meeting_of_nodes) as meeting:
                texts = meeting.texts((patience or self.timeout).total_seconds(), finish=False)
            self._leave(meeting)
            self._nodes = [number_in(text, "nodes", 2**31) for text in texts]
        return self._nodes

    def leaders(self) -> list[int]:
        return [node[0] for node in by_node(self.node_of_ranks())]

    def own_node(self) -> list[int]:
        """The members of this member's node, ascending."""
        return next(node for node in by_node(self.node_of_ranks()) if self.rank in node)

    def agree(self, what: str, lines: list[str]) -> int:
        """Raise BaguaMismatchError, on all members, unless their ``lines`` are equal.

        Returns a random number that the members share, as ``incarnation`` does.
        """
        number = secrets.randbits(63) if self.rank == 0 else 0
        if self.size == 1:
            return number
        own = fingerprint(lines) >> 1
        with self.collective_phase(f"agreeing on {what}"):
            self.main_communicator("cpu")
            numbers = own, -own, -self._own_round_trip_us(), -number
            least, negated, farthest, shared = self.reduce_numbers(what, _C.ReduceOp.MIN, *numbers)
            self._know_round_trip(-farthest)
            if least == -negated:
                return -shared
            values = self.gather_numbers(what, own)
            other = next(rank for rank in range(self.size) if values[rank] != values[0])
            text = json.dumps(lines) if self.rank in (0, other) else ""
            name = f"agree/{self.next_wrap()}"
            texts = self._gather(name, list(range(self.size)), text)
        first, second = (lines_in(texts[rank], f"{name} of rank {rank}") for rank in (0, other))
        raise mismatch(what, first, second, other)

    def _own_round_trip_us(self) -> int:
        if self._main_sockets is None or self._main["cpu"].shares_memory:
            return 0
        return self._main_sockets.round_trip_us()

    def _know_round_trip(self, microseconds: int) -> None:
        """All members know it from here on."""
        were_far, self.round_trip_us = self.are_far, microseconds
        if were_far or not self.are_far or self._main_sockets is None:
            return
        self._control_congestion(self._main_sockets)
        if self.size <= _C.MOST_RANKS_TOLD_DIRECTLY:
            for communicator in self._main.values():
                communicator.shorten_paths()

    def _control_congestion(self, sockets: _C.OpenedSockets) -> None:
        wanted = env.congestion_control_of_far_ranks()
        if wanted and sockets.control_congestion_by(wanted):
            self.congestion_control = wanted
            return
        known = env.congestion_controls()
        if os.environ.get("BAGUA_CONGESTION_CONTROL"):
            raise ValueError(
                f"BAGUA_CONGESTION_CONTROL={wanted}: the kernel does not let this process choose "
                f"it; it has {', '.join(known)}"
            )
        self.congestion_control = known[0] if known else ""


class MainThreadTraffic:
    """Counts what the main thread sends for one module between rounds, by purpose."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.by_purpose: dict[str, dict[str, int]] = {}

    @contextmanager
    def counted(self, purpose: str) -> Iterator[None]:
        """Count what goes over the main thread's communicators inside."""
        before = self._connections.main_traffic()
        try:
            yield
        finally:
            after = self._connections.main_traffic()
            add_traffic(
                self.by_purpose, purpose, {key: after[key] - before[key] for key in TRAFFIC}
            )


def call_until(hopeless: Callable[[], str], *works: Callable[[], Any]) -> list[Any]:
    """Call ``works`` at once, and return their results; they may block. Ctrl-C, and a text of
    ``hopeless``, which is raised as BaguaError, end the wait and leave the calls to themselves."""
    outcomes: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def run(number: int, work: Callable[[], Any]) -> None:
        try:
            outcomes.put((number, work(), None))
        except BaseException as error:  # noqa: BLE001 - raised where it is taken
            outcomes.put((number, None, error))

    for place in enumerate(works):
        threading.Thread(target=run, args=place, name="bagua-wait", daemon=True).start()
    results: dict[int, Any] = {}
    while len(results) < len(works):
        try:
            number, result, error = outcomes.get(timeout=_BETWEEN_QUESTIONS_S)
        except queue.Empty:
            if reason := hopeless():
                raise _C.BaguaError(reason) from None
        else:
            if error is not None:
                raise error
            results[number] = result
    return [results[number] for number in range(len(works))]


def _key_of(name: str, members: list[int]) -> str:
    """A short key for what ``members`` call ``name``."""
    digest = hashlib.blake2b(repr(members).encode(), digest_size=6).hexdigest()
    return f"{name}/{digest}"


def check_open_files(connections: int) -> None:
    """Raise BaguaError where this process may not open so many connections.

    gloo ends the process when it cannot accept one.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:  # of the last file
        taken = limit
    needed = taken + connections + _FILES_BESIDE
    if needed > limit:
        enough = max(_ENOUGH_FILES, 1 << (needed + 4 * connections).bit_length())
        raise _C.BaguaError(
            f"{connections} more connection(s) to other ranks take {needed} open files in this "
            f"process, of which it has {taken}, and it may have {limit}. Call `ulimit -n {enough}` "
            "before torchrun on every machine, or set LimitNOFILE= of its service"
        )


def _gloo(
    stores: Sequence[c10d.Store],
    rank: int,
    size: int,
    others: list[int],
    timeout: timedelta,
    hopeless: Callable[[], str],
) -> list[Any]:
    """Backends that are connected to ``others``, and whose sockets no child of this process has.

    gloo would connect a pair at its first message. Then the kernel would not be asked to probe it,
    a rank that listens would wait in vain for one that has died, and a wrong interface would be
    found in the middle of training. So those that will have messages have one here.
    """
    few = len(others) < size - 1 and size > _C.MOST_RANKS_TOLD_DIRECTLY

    def connect(store: c10d.Store) -> Any:
        if not few or (device := _device_of_few()) is None:
            return dist.ProcessGroupGloo(store, rank, size, _gloo_options(timeout))
        made: Any = dist.ProcessGroupGloo(store, rank, size, _options_on([device], timeout))
        greeting = torch.zeros(1, dtype=torch.uint8, device="cpu")
        received = [torch.zeros_like(greeting) for _ in others]
        _C.C10dCommunicator(made).exchange(
            [(greeting, other) for other in others], list(zip(received, others, strict=True))
        )
        return made

    sockets = _C.OpenedSockets()
    made = call_until(hopeless, *(partial(connect, store) for store in stores))
    sockets.keep_from_children()
    return made


def _gloo_options(timeout: timedelta) -> Any:
    """Options of a backend on the device of torch's group, or only ``timeout`` where it has none.

    The thread of a device wakes a hundred times a second, whatever it serves.
    """
    with suppress(RuntimeError, ValueError):  # torch has no group, or none for CPU tensors
        gloo: Any = dist.ProcessGroupGloo
        of_torch: Any = c10d._get_default_group()._get_backend(torch.device("cpu"))
        if isinstance(of_torch, gloo):
            return _options_on(of_torch.options._devices, timeout)
    return timeout


def _options_on(devices: list[Any], timeout: timedelta) -> Any:
    """A communicator makes one call at a time, for which one more thread will do."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._threads, options._devices = timeout, 1, devices
    return options


def _device_of_few() -> Any:
    """A device of gloo whose pairs connect as they are used; None where the user names several
    interfaces. For one backend: pairs of two of them on one device would never connect."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if len(names) > 1:
        return None
    gloo: Any = dist.ProcessGroupGloo
    if names:
        return gloo.create_device(interface=names[0], lazy_init=True)
    return gloo.create_default_device(lazy_init=True)


def _leave(board: _C.Board, process: int) -> None:
    if os.getpid() == process:  # a forked child has no thread that could
        board.leave()


def gpu_identity(device: torch.device) -> str:
    """Identity of the GPU behind a CUDA device, in whatever process and order it is visible."""
    return str(torch.cuda.get_device_properties(device).uuid)


def nccl_paths() -> list[str]:
    """Paths of NCCL to try in a process that has not loaded it, the best one first.

    Without ``BAGUA_NCCL_LIBRARY``: the wheel that torch's CUDA wheels depend on, torch's own
    folder of libraries, and what the loader finds.
    """
    chosen = env.get_nccl_library()
    if chosen is not None:
        return [chosen]
    has_wheels = importlib.util.find_spec("nvidia") is not None
    wheel = importlib.util.find_spec("nvidia.nccl") if has_wheels else None
    roots = list(wheel.submodule_search_locations or []) if wheel else []
    files = [Path(root) / "lib" / _NCCL for root in [*roots, str(Path(torch.__file__).parent)]]
    return [*(str(file) for file in files if file.exists()), _NCCL]


@functools.cache
def nccl_library() -> _C.NcclLibrary:
    """The NCCL of this process: the one it has loaded already, else the first of ``nccl_paths()``.

    Raises BaguaError, which lists the paths, where there is none of a usable version.
    """
    return _C.NcclLibrary.find(nccl_paths())


def mismatch(what: str, first: list[str], second: list[str], other: int) -> _C.BaguaMismatchError:
    """The error for lines of rank 0 that are not those of rank ``other``."""
    pairs = itertools.zip_longest(first, second, fillvalue="nothing")
    texts = (f"rank 0 has [{a}], rank {other} has [{b}]" for a, b in pairs if a != b)
    return _C.BaguaMismatchError(
        f"ranks differ in {what}. First difference: {next(texts, 'none in the text')}. "
        "Build the same model with the same arguments on every rank."
    )
