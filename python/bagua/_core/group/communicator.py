"""``Communicator``: the ranks that eager collectives run on, and what is known of a failure."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.connections import Connections, cuda_transport

__all__ = ["CommMember", "Communicator", "ReduceOp", "comm"]


class ReduceOp(enum.IntEnum):
    """How elements of several ranks become one. AVG is SUM divided by the number of ranks.

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
        self._backends: dict[str, Any] = {}
        self._pairs: dict[tuple[str, int], _C.CountingCommunicator] = {}
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
        self.run("barrier", torch.device("cpu"), lambda backend: backend.barrier())

    def abort(self) -> None:
        """Make later calls raise, and end calls in flight where the transport can."""
        self._ended = "the communicator was aborted"
        for backend in list(self._backends.values()):
            backend.abort()
        for pair in list(self._pairs.values()):
            pair.abort(self._ended)

    def check_abort(self) -> bool:
        """Whether :meth:`abort` was called, or the process group was destroyed."""
        return self._ended is not None

    def close(self) -> None:
        """Drop the connections; later calls raise."""
        if self._ended is None:
            self._ended = "the process group was destroyed"
        self._backends.clear()
        self._pairs.clear()
        self._board = None

    def run(self, name: str, device: torch.device, start: Callable[[Any], Any]) -> None:
        """Start one operation on the c10d backend for ``device`` and wait for its end.

        Raises:
            BaguaTimeoutError: a member did not answer in the group's time.
            BaguaError: the communicator was aborted, its group destroyed, or the transport failed.
        """
        self._begin(name)
        self._calls += 1
        self._note(self._calls, name, waits=True)
        if device.type not in self._backends:
            self._backends[device.type] = self._connect(name, device.type)
        backend = self._backends[device.type]
        self._wait(name, lambda: start(backend))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        self._note(self._calls, f"after its {name}", waits=False)

    def exchange(
        self, name: str, peer: int, sends: list[torch.Tensor], recvs: list[torch.Tensor]
    ) -> None:
        """Send tensors to member ``peer`` and receive others from it, all on one device.

        Only collectives are counted for the errors, because other members make no call here. A
        message has the number of the next collective.

        Raises:
            BaguaTimeoutError: ``peer`` did not answer in the group's time.
            BaguaError: as :meth:`run`.
        """
        self._begin(name)
        device = (sends + recvs)[0].device
        self._note(self._calls + 1, name, waits=True)
        try:
            pair = self._pair(device.type, peer)
            other = 1 - pair.rank
            pair.exchange([(data, other) for data in sends], [(data, other) for data in recvs])
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
                _raise_late_failure(pair)
        except _C.BaguaError as error:
            first, second = sorted((self._rank, peer))
            text = f"between ranks {first} and {second}: {error}"
            raise self._failure(name, self._calls + 1, text) from error
        self._note(self._calls, f"after its {name}", waits=False)

    def _begin(self, name: str) -> None:
        if self._ended is not None:
            raise _C.BaguaError(f"{name}: {self._ended}")
        if self._board is None:
            self._board = self._connections.board(f"eager/{self._name}", self._members)

    def _note(self, call: int, text: str, waits: bool) -> None:
        if self._board is not None:
            self._board.beat(call, text, waits)

    def _pair(self, device_type: str, peer: int) -> _C.CountingCommunicator:
        """The connection with one other member, made by both when they use it first."""
        if (device_type, peer) not in self._pairs:
            members = [self._members[rank] for rank in sorted((self._rank, peer))]
            purpose = f"eager/{self._name}/pair/{device_type}"
            pair = self._connections.connect(purpose, device_type, members)
            if _goes_over_gloo(device_type):
                _meet(pair)
            self._pairs[device_type, peer] = pair
        return self._pairs[device_type, peer]

    def _connect(self, name: str, device_type: str) -> Any:
        over_gloo = _goes_over_gloo(device_type)
        purpose = f"eager/{self._name}/{device_type}"
        try:
            backend = self._connections.backend(
                purpose, "cpu" if over_gloo else device_type, self._members
            )
        except _C.BaguaError as error:
            raise self._failure(name, self._calls, str(error)) from error
        if over_gloo:
            # A member that only sends could be through, and gone, before another has connected to
            # it, which then would fail.
            self._wait(name, lambda: backend.barrier())
        return backend

    def _wait(self, name: str, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise self._failure(name, self._calls, str(error)) from error

    def _failure(self, name: str, call: int, text: str) -> _C.BaguaError:
        """The error of a call, with where the other members are."""
        late = "timed out" in text.lower() or "timeout" in text.lower()
        others = ""
        if self._board is not None:
            self._board.publish(text, is_secondary=True)
            others = " " + self._board.survey(call, unit="call", everyone=True)
        return (_C.BaguaTimeoutError if late else _C.BaguaError)(
            f"{name}, call {call} on rank {self._rank} of {self.nranks()}, failed: {text}. "
            f"Every member must make the same call with the same sizes and dtypes.{others}"
        )

    def __repr__(self) -> str:
        return f"Communicator({self._name}, rank {self._rank} of {self.nranks()})"


def _goes_over_gloo(device_type: str) -> bool:
    return device_type == "cpu" or (device_type == "cuda" and cuda_transport() == "gloo")


def _meet(connected: _C.Communicator) -> None:
    """Returns when all members have connected to each other over gloo.

    A member that only sends could be through, and gone, before another has connected to it, which
    then would fail.
    """
    connected.all_reduce(torch.zeros(1, device="cpu"), _C.ReduceOp.SUM)


def _raise_late_failure(connected: _C.Communicator) -> None:
    """Raises what went wrong on the device after NCCL's call had returned.

    A call that moves nothing says so.
    """
    connected.exchange([], [])
