"""Makes the communicators of a group: each with connections of its own over the job's store."""

from __future__ import annotations

import collections
import functools
import hashlib
import importlib.util
import itertools
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.rendezvous import lines_in, number_in, stored_number
from bagua._core.group.warn import warn

#: Names of what a communicator has moved.
MOVED = ("bytes_sent", "bytes_received", "messages_sent", "messages_received")
#: Names of all counters of a communicator.
TRAFFIC = (*MOVED, "shm_bytes", "wire_ns")

_NCCL = "libnccl.so.2"

#: Seconds between two looks of a phase at the ranks that have exited.
_BETWEEN_LOOKS_S = 1.0
#: Seconds that the end of a phase waits for the answer to its last look.
_SECONDS_FOR_AN_ANSWER = 2.0

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


def cuda_transport() -> str:
    """Transport of CUDA tensors; over "gloo", through host memory, ranks may share a GPU."""
    comm = env.get_comm()
    return comm if comm in ("nccl", "c10d", "gloo") else "nccl" if _C.has_nccl else "c10d"


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
        self._devices: list[torch.device] = []
        self._nodes: list[int] | None = None
        self._told_why_unshared = False
        self._phases = 0
        self._in_phase = False
        self._watch: _PhaseWatch | None = None
        self._wraps = 0
        self._node = env.get_node_number() if node is None else node
        self._came: set[str] = set()  # to meetings that were left by an exception
        self._waits_in: _C.Gathering | None = None  # the main thread, in a phase
        if rank >= 0:  # before anyone can wait for it
            self._meeting_of_nodes = self._meeting("nodes", list(range(self.size)))
            self._meeting_of_nodes.bring(str(self._node))

    @property
    def size(self) -> int:
        return len(self.ranks)

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
        alone = self._in_phase or self.rank < 0
        self._phases += not alone
        board = None if alone else self.board(f"phase{self._phases}")
        if board is None:
            yield
            return
        board.beat(self._phases, what, waits=True)
        self._in_phase = True
        self._watch = watch = _PhaseWatch(self, board, what)
        try:
            with watch:
                yield
        except _C.BaguaMismatchError:
            raise
        except KeyboardInterrupt:
            board.publish(f"{what}: rank {self.rank} was interrupted")
            raise
        except (_C.BaguaError, dist.DistError) as error:
            board.publish(str(error), _C.Blame.MAYBE_OTHER)
            kind = type(error) if isinstance(error, _C.BaguaError) else _C.BaguaError
            seen = f"{what}, rank {self.rank} of {self.size}: {watch.exited or error}"
            if watch.exited:
                raise _C.BaguaError(seen) from error
            raise kind(board.diagnose(seen, self._phases, "phase", everyone=True)) from error
        finally:
            self._in_phase = False
            self._watch = None

    def publish_exit(self) -> None:
        """Tell the members that this one takes part in no further phase. Never raises."""
        if self.rank >= 0 and self.size > 1:
            with suppress(RuntimeError):  # the process with the store may be gone
                self.store.set(f"exited/{self.rank}", str(self._phases))

    def exited_member(self) -> int | None:
        """A member that has exited without coming to the phase of this one."""
        for rank in range(self.size):
            key = f"exited/{rank}"
            if self.store.check([key]) and stored_number(self.store, key, 2**63) < self._phases:
                return rank
        return None

    def _meeting(self, name: str, members: list[int]) -> _C.Gathering:
        """A meeting of ``members`` in the store."""
        key, seconds = _key_of(name, members), self.timeout.total_seconds()
        place = members.index(self.rank), len(members)
        return _C.Gathering(self.store, key, *place, seconds, key in self._came)

    @contextmanager
    def _met(
        self, name: str, members: list[int], begun: _C.Gathering | None = None
    ) -> Iterator[_C.Gathering]:
        """A meeting that is held inside, and that :meth:`abort` ends."""
        meeting, key = begun or self._meeting(name, members), _key_of(name, members)
        self._came.add(key)
        if self._in_phase:
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
        deadline = time.monotonic() + self.timeout.total_seconds()

        def hopeless() -> str:
            if self._watch is not None and (news := self._watch.news()):
                return news
            late = time.monotonic() > deadline
            return f"timed out after {self.timeout.total_seconds():g} s" if late else ""

        return hopeless

    def abort(self, reason: str) -> None:
        """End what the main thread waits for in a communicator: it raises ``reason``."""
        for communicator in list(self._main.values()):
            communicator.abort(reason)
        if (meeting := self._waits_in) is not None:
            meeting.give_up(reason)

    def reduce_numbers(self, what: str, op: _C.ReduceOp, *numbers: int) -> list[int]:
        """The minimum, maximum or sum over all members of each of ``numbers``."""
        values = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if self.size > 1:
            with self.collective_phase(what):
                self.main_communicator("cpu").all_reduce(values, op)
        return [int(value) for value in values]

    def gather_numbers(self, what: str, own: int) -> list[int]:
        """``own`` of each member."""
        alone = (own if rank == self.rank else 0 for rank in range(self.size))
        return self.reduce_numbers(what, _C.ReduceOp.SUM, *alone)

    def main_communicator(self, device: torch.device | str) -> _C.CountingCommunicator:
        """The communicator that belongs to the main thread, for tensors of ``device``."""
        label = self.label(device)
        if label not in self._main:
            self._main[label] = self.connect(f"main/{label}", device)
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
    ) -> _C.CountingCommunicator:
        """A new communicator over ``members`` (ranks in this group; default: all).

        ``nodes_known``: to all members. ``sums_of_torch``: reductions of CPU tensors have the bits
        of torch's, which gloo makes, unless BAGUA_COMM names shared memory.
        """
        device = torch.device(device)
        if self.rank < 0:
            raise RuntimeError(f"this process is not a member of the group with ranks {self.ranks}")
        members = list(range(self.size)) if members is None else members
        if len(members) == 1:
            alone = _C.ThreadHub(1, self.timeout.total_seconds())
            return _C.CountingCommunicator(_C.ThreadCommunicator(alone, 0))
        start = time.monotonic()
        sockets = _C.OpenedSockets()
        connected: _C.Communicator
        through = cuda_transport() if device.type == "cuda" else "c10d"
        if through == "nccl":
            connected = self._nccl(name, device, members)
        elif through == "gloo":
            gloo = _C.C10dCommunicator(self.backend(name, "cpu", members))
            connected = _C.HostCommunicator(gloo)
        elif device.type == "cpu":
            connected = self._on_cpu(name, members, sums_of_torch, nodes_known)
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
        return _C.CountingCommunicator(connected)

    def connect_nodes(
        self, name: str, device: torch.device | str
    ) -> tuple[_C.CountingCommunicator, _C.CountingCommunicator | None]:
        """This member's node and, on its leader, the leaders of several nodes. All call it."""
        leaders = self.leaders()
        several = {"leaders": leaders} if len(leaders) > 1 else {}
        node, between = self._connect_own_node(name, device, several)
        return node, between[0] if between else None

    def connect_shares(
        self, name: str, device: torch.device | str
    ) -> tuple[_C.CountingCommunicator, list[_C.CountingCommunicator | None]]:
        """New communicators over this member's node and, for each share of a bucket, over the
        members that have it: in a node of n members share s is of member s mod n. There is one
        share for each member of the largest node, and none where there is one node. None for shares
        that this member has not. Called by all members."""
        members = by_node(self.node_of_ranks())
        most = max(map(len, members)) if len(members) > 1 else 0
        shares = {str(s): [node[s % len(node)] for node in members] for s in range(most)}
        return self._connect_own_node(f"{name}/shares", device, shares)

    def _connect_own_node(
        self, name: str, device: torch.device | str, between: dict[str, list[int]]
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
            self.connect(f"{name}/{group}", device, ranks, nodes_known=True)
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
        self, name: str, members: list[int], sums_of_torch: bool, nodes_known: bool
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
        on_one_node = not reason
        if on_one_node:
            with self._met(f"{name}/shm", members) as meeting:
                shared, reason, on_one_node = meeting.share_memory(self._node, refusal)
            if shared is not None:
                return shared
        if comm == "shm":
            raise _C.BaguaError(
                f"BAGUA_COMM=shm: ranks {members} of the group cannot share memory: {reason}. "
                "Unset BAGUA_COMM, and gloo connects ranks that share none."
            )
        told = bool(refusal) or not on_one_node or self._told_why_unshared
        if not told and self.rank == members[0]:
            self._told_why_unshared = True
            _log.info("ranks %s use gloo instead of shared memory: %s", members, reason)
        return _C.C10dCommunicator(self.backend(name, "cpu", members))

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

    def backend(self, name: str, device_type: str, members: list[int]) -> Any:
        """A new c10d backend over ``members`` (ranks in this group, this process among them)."""
        store = self._store_of(name, members)
        rank, size = members.index(self.rank), len(members)
        try:
            if device_type == "cpu":
                with self._met(f"{name}/gloo", members) as meeting:
                    try:
                        return _gloo(meeting.store(), rank, size, self.timeout, self.connecting())
                    finally:
                        meeting.give_up("this rank connects no more")
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

    def board(self, name: str, members: list[int] | None = None) -> _C.FailureBoard | None:
        """Board on which ``members`` (default: all) publish failures; None for a single rank."""
        members = list(range(self.size)) if members is None else members
        if len(members) == 1:
            return None
        store = self._store_of(f"board/{name}", members)
        return _C.FailureBoard(store, members.index(self.rank), len(members))

    def incarnation(self) -> int:
        """A random number that the members share, and that no other call of theirs returns."""
        own = secrets.randbits(63) if self.rank == 0 else 0
        return self.reduce_numbers("agreeing on a number", _C.ReduceOp.MAX, own)[0]

    def node_of_ranks(self, patience: timedelta | None = None) -> list[int]:
        """Node number of every member, as each gave it to the store when it made the group.

        ``patience``: for members that have not made it yet; default the group's timeout.
        """
        if self._nodes is None:
            with self._met("nodes", list(range(self.size)), self._meeting_of_nodes) as meeting:
                texts = meeting.texts((patience or self.timeout).total_seconds())
            self._nodes = [number_in(text, "nodes", 2**31) for text in texts]
        return self._nodes

    def leaders(self) -> list[int]:
        return [node[0] for node in by_node(self.node_of_ranks())]

    def own_node(self) -> list[int]:
        """The members of this member's node, ascending."""
        return next(node for node in by_node(self.node_of_ranks()) if self.rank in node)

    def agree(self, what: str, lines: list[str]) -> None:
        """Raise BaguaMismatchError, on all members, unless their ``lines`` are equal."""
        if self.size == 1:
            return
        own = fingerprint(lines) >> 1
        with self.collective_phase(f"agreeing on {what}"):
            least, negated = self.reduce_numbers(what, _C.ReduceOp.MIN, own, -own)
            if least == -negated:
                return
            values = self.gather_numbers(what, own)
            other = next(rank for rank in range(self.size) if values[rank] != values[0])
            text = json.dumps(lines) if self.rank in (0, other) else ""
            name = f"agree/{self.next_wrap()}"
            texts = self._gather(name, list(range(self.size)), text)
        first, second = (lines_in(texts[rank], f"{name} of rank {rank}") for rank in (0, other))
        raise mismatch(what, first, second, other)


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


def call_until(hopeless: Callable[[], str], work: Callable[[], Any]) -> Any:
    """``work()``, which may block; Ctrl-C, and a text of ``hopeless``, which is raised as
    BaguaError, end the wait and leave the call to itself."""
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised where it is taken
            outcome.put((None, error))

    threading.Thread(target=run, name="bagua-wait", daemon=True).start()
    while True:
        try:
            result, error = outcome.get(timeout=_BETWEEN_QUESTIONS_S)
        except queue.Empty:
            if reason := hopeless():
                raise _C.BaguaError(reason) from None
        else:
            if error is not None:
                raise error
            return result


def _key_of(name: str, members: list[int]) -> str:
    """A short key for what ``members`` call ``name``."""
    digest = hashlib.blake2b(repr(members).encode(), digest_size=6).hexdigest()
    return f"{name}/{digest}"


def _gloo(
    store: c10d.Store, rank: int, size: int, timeout: timedelta, hopeless: Callable[[], str]
) -> Any:
    """A backend whose sockets no child of this process has."""
    sockets = _C.OpenedSockets()
    made = call_until(hopeless, lambda: dist.ProcessGroupGloo(store, rank, size, timeout))
    sockets.keep_from_children()
    return made


class _PhaseWatch(threading.Thread):
    """Says whom a phase waits for, and ends the wait for a rank that has exited.

    ``exited``: what to say of such a rank; empty: none has been seen.
    """

    def __init__(self, connections: Connections, board: _C.FailureBoard, what: str) -> None:
        super().__init__(name="bagua phase", daemon=True)
        self.exited = ""
        self._connections = connections
        self._board = board
        self._what = what
        self._over = threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: Any) -> None:
        # A thread that comes back from a question to the store while the interpreter ends would end
        # the process: Note [Drops at exit].
        self._over.set()
        self.join(_SECONDS_FOR_AN_ANSWER)

    def news(self) -> str:
        """Of a rank that has exited or failed; empty: there are none."""
        return self.exited or self._board.poll() or ""

    def run(self) -> None:
        start = time.monotonic()
        report_after = env.get_straggler_seconds()
        # The main thread raises what is wrong with the store.
        with suppress(RuntimeError):
            while not self._over.wait(_BETWEEN_LOOKS_S):
                rank = self._connections.exited_member()
                if rank is not None and not self._over.is_set():
                    self.exited = (
                        f"rank {rank} has exited, and takes no part. Every rank of the group calls "
                        "this: look for a condition such as `if rank == 0` around it."
                    )
                    return self._connections.abort(self.exited)
                waited = time.monotonic() - start
                if 0 < report_after <= waited:
                    report_after = 2 * waited
                    self._report(waited)

    def _report(self, waited: float) -> None:
        others = self._board.survey(self._connections._phases, "phase", True)
        me = f"rank {self._connections.rank} of {self._connections.size}"
        with suppress(Warning):
            warn(
                f"{self._what}, {me}: waiting for other ranks for {waited:.0f} s. {others}",
                RuntimeWarning,
                each_rank=True,
            )


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
