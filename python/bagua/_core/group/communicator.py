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
    its own, made by the first collective, so it never gets in the way of a training step.

    One thread uses it; only :meth:`abort` may be called from another. All members make the same
    calls in the same order, with tensors of the same size and dtype.

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

    def check_abort(self) -> bool:
        """Whether :meth:`abort` was called, or the process group was destroyed."""
        return self._ended is not None

    def close(self) -> None:
        """Drop the connections; later calls raise."""
        if self._ended is None:
            self._ended = "the process group was destroyed"
        self._backends.clear()
        self._board = None

    def run(self, name: str, device: torch.device, start: Callable[[Any], Any]) -> None:
        """Start one operation on the c10d backend for ``device`` and wait for its end.

        Raises:
            BaguaTimeoutError: a member did not answer in the group's time.
            BaguaError: the communicator was aborted, its group destroyed, or the transport failed.
        """
        if self._ended is not None:
            raise _C.BaguaError(f"{name}: {self._ended}")
        if self._board is None:
            self._board = self._connections.board(f"eager/{self._name}", self._members)
        self._calls += 1
        self._note(name, waits=True)
        if device.type not in self._backends:
            self._backends[device.type] = self._connect(name, device.type)
        backend = self._backends[device.type]
        self._wait(name, lambda: start(backend))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        self._note(f"after its {name}", waits=False)

    def _note(self, text: str, waits: bool) -> None:
        if self._board is not None:
            self._board.beat(self._calls, text, waits)

    def _connect(self, name: str, device_type: str) -> Any:
        over_gloo = device_type == "cpu" or (device_type == "cuda" and cuda_transport() == "gloo")
        purpose = f"eager/{self._name}/{device_type}"
        try:
            backend = self._connections.backend(
                purpose, "cpu" if over_gloo else device_type, self._members
            )
        except _C.BaguaError as error:
            raise _C.BaguaError(f"{name}: {error}{self._others(str(error))}") from error
        if over_gloo:
            # A member that only sends could be through, and gone, before another has connected to
            # it, which then would fail.
            self._wait(name, lambda: backend.barrier())
        return backend

    def _wait(self, name: str, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            text = str(error)
            late = "timed out" in text.lower() or "timeout" in text.lower()
            raise (_C.BaguaTimeoutError if late else _C.BaguaError)(
                f"{name}, call {self._calls} on rank {self._rank} of {self.nranks()}, failed: "
                f"{text}. Every member must make the same call with the same sizes and dtypes."
                f"{self._others(text)}"
            ) from error

    def _others(self, failure: str) -> str:
        """Where the other members are, for the error of a call."""
        if self._board is None:
            return ""
        self._board.publish(failure, is_secondary=True)
        return " " + self._board.survey(self._calls, unit="call", everyone=True)

    def __repr__(self) -> str:
        return f"Communicator({self._name}, rank {self._rank} of {self.nranks()})"
