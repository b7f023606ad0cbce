"""``Communicator``: the ranks of eager collectives, and the diagnosis of their failures."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.connections import (
    TRAFFIC,
    Connections,
    cuda_transport,
    total_traffic,
)

__all__ = ["CommMember", "Communicator", "ReduceOp", "comm"]


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


class Communicator:
    """Some members of a process group, numbered from 0, that run eager collectives together.

    Made by ``BaguaProcessGroup.get_*_communicator()``. For every device type it has connections of
    its own, made by the first collective, so it never gets in the way of a training step. Two
    members that send messages to each other earlier connect for themselves: a message needs its
    sender and its receiver only.

    One thread uses it; only :meth:`abort` may be called from another. All members run the same
    collectives in the same order, with tensors of the same size and dtype.

    Attributes:
        cuda_stream: the stream its group was made with, or None.
    """

    def __init__(
        self, connections: Connections, name: str, members: list[int], stream: Any
    ) -> None:
        self.cuda_stream = stream
        self._connections = connections
        self._name = name
        self._members = members
        self._rank = members.index(connections.rank)
        # By device type, with "/sums" where sums are torch's, and, where two members have connected
        # for themselves, the other one.
        self._connected: dict[tuple[str, int | None], _C.CountingCommunicator] = {}
        self._board: _C.FailureBoard | None = None
        self._calls = 0
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
        for connected in list(self._connected.values()):
            connected.abort(self._ended)

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
        """Call ``move`` with the communicator of all members for ``device``; wait for its end.

        ``sums_of_torch``: as of ``Connections.connect()``.

        Raises:
            BaguaTimeoutError: a member did not answer in the group's time.
            BaguaError: the communicator was aborted, its group destroyed, or the transport failed.
        """
        self._start(name)
        self._calls += 1
        self._move(name, self._calls, device, None, move, sums_of_torch)

    def exchange(
        self, name: str, peer: int, sends: list[torch.Tensor], recvs: list[torch.Tensor]
    ) -> None:
        """Send tensors to member ``peer`` and receive others from it, all on one device.

        Only collectives are counted for the errors, because other members make no call here. A
        message has the number of the next collective.
        """

        def move(connected: _C.Communicator) -> None:
            other = peer if connected.size == self.nranks() else 1 - connected.rank
            connected.exchange([(data, other) for data in sends], [(data, other) for data in recvs])

        self._start(name)
        self._move(name, self._calls + 1, (sends + recvs)[0].device, peer, move)

    def _start(self, name: str) -> None:
        if self._ended is not None:
            raise _C.BaguaError(f"{name}: {self._ended}")
        if self._board is None:
            self._board = self._connections.board(f"eager/{self._name}", self._members)

    def _move(
        self,
        name: str,
        call: int,
        device: torch.device,
        peer: int | None,
        move: Callable[[_C.Communicator], None],
        sums_of_torch: bool = False,
    ) -> None:
        self._note(call, name, waits=True)
        try:
            connected = self._connect(device, peer, sums_of_torch)
            move(connected)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
                # NCCL fails on the device after its call has returned; the next call raises.
                connected.exchange([], [])
        except KeyboardInterrupt:
            self._ended = f"rank {self._rank} was interrupted in its {name}"
            if self._board is not None:
                self._board.publish(self._ended)
            raise
        except _C.BaguaError as error:
            raise self._failure(name, call, peer, error) from error
        self._note(self._calls, f"after its {name}", waits=False)

    def _note(self, call: int, text: str, waits: bool) -> None:
        if self._board is not None:
            self._board.beat(call, text, waits)

    def _connect(
        self, device: torch.device, peer: int | None, sums_of_torch: bool = False
    ) -> _C.CountingCommunicator:
        """Connections of all members, or of this one and ``peer`` if there are none of all yet.

        Connecting all of them is collective, so the two members of a message know alike.
        """
        label = self._connections.label(device)
        if sums_of_torch and device.type == "cpu":
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
        text = str(error)
        if peer is not None:
            first, second = sorted((self._rank, peer))
            text = f"between ranks {first} and {second}: {text}"
        text = text.rstrip(".")
        seen = (
            f"{name}, call {call} on rank {self._rank} of {self.nranks()}, failed: {text}. "
            "Every member must make the same call with the same sizes and dtypes."
        )
        if self._board is not None:
            self._board.publish(text, _C.Blame.MAYBE_OTHER)
            seen = self._board.diagnose(seen, call, "call", everyone=True, peer=peer)
        late = isinstance(error, _C.BaguaTimeoutError)
        return (_C.BaguaTimeoutError if late else _C.BaguaError)(seen)

    def __repr__(self) -> str:
        return f"Communicator({self._name}, rank {self._rank} of {self.nranks()})"


def _meet(connected: _C.Communicator) -> None:
    """Returns when all members are here."""
    connected.all_reduce(torch.zeros(1, device="cpu"), _C.ReduceOp.SUM)
