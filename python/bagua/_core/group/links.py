"""Which members of an elastic group reach each other, over TCP at the address of gloo.

Note [One bad link]
Where two members have lost the link between them and reach everyone else, the group goes on without
one of the two. After a round that failed each member listens for the time of the change, and sends
some kilobytes to each other one that has come, which returns them: the answers are there before
those that do not come count as lost. A link is bad if both of its ends say so: one of them may be
behind a firewall that lets connections out alone. The member with the most bad links goes, the
higher one of two; and so on until no bad link is left.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from bagua._core.group.interfaces import own_address

#: Seconds for a connection, and as many for the bytes.
PATIENCE = 5.0
_THREADS = 32  # at each end
#: More than a packet: small ones may pass where large ones are lost. TCP sends so many at once.
_BYTES = 8 * 1024
_TOKEN = 16  # letters


class Place(NamedTuple):
    """Where a member listens during a change, and what it expects to be told."""

    address: str
    port: int
    token: str

    @staticmethod
    def of(address: str, port: int, token: str) -> Place:
        """ValueError: it is none."""
        if not 0 < port < 2**16 or len(token) != _TOKEN:
            raise ValueError(port, token)
        return Place(str(ipaddress.ip_address(address)), port, token)


class Links:
    """To the other members of a change, until it is closed.

    Returns bytes to those that know the token, at most 32 at a time. OSError: nothing can listen.

    Attributes:
        place: for the others, which ask there.
    """

    def __init__(self) -> None:
        self._listening = socket.create_server((own_address(), 0), backlog=512)
        address, port = self._listening.getsockname()
        self.place = Place(address, port, secrets.token_hex(_TOKEN // 2))
        self._answering = ThreadPoolExecutor(_THREADS + 1, "bagua-door")
        self._answering.submit(self._serve)
        self._asking = ThreadPoolExecutor(_THREADS, "bagua-links")
        self._asked: dict[int, Future[bool]] = {}
        self._told: set[int] = set()

    def ask(self, places: Mapping[int, Place]) -> dict[int, bool]:
        """Ask those that have not been asked yet whether they return bytes, without waiting.

        Returns what has come since the last call, by member.
        """
        for member, place in places.items():
            if member not in self._asked:
                self._asked[member] = self._asking.submit(_reaches, place)
        new = {m for m, asked in self._asked.items() if m not in self._told and asked.done()}
        self._told |= new
        return {member: self._asked[member].result() for member in new}

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # which ends accept()
        self._listening.close()
        for threads in (self._answering, self._asking):
            threads.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        with suppress(OSError, RuntimeError):  # it is closed
            while True:
                self._answering.submit(self._answer, self._listening.accept()[0])

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(PATIENCE)
            if hmac.compare_digest(_receive(connection, _TOKEN), self.place.token.encode()):
                connection.sendall(_receive(connection, _BYTES))


def left_out(apart: Iterable[tuple[int, int]]) -> list[int]:
    """The members without which no bad link is left."""
    bad, gone = [*apart], []
    while bad:
        ends = [end for link in bad for end in link]
        gone.append(max(ends, key=lambda end: (ends.count(end), end)))
        bad = [link for link in bad if gone[-1] not in link]
    return gone


def _reaches(place: Place) -> bool:
    sent = secrets.token_bytes(_BYTES)
    with suppress(OSError), socket.create_connection(place[:2], PATIENCE) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(place.token.encode() + sent)
        return _receive(connection, _BYTES) == sent
    return False


def _receive(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        part = connection.recv(length - len(received))
        if not part:
            raise OSError("the connection has ended")
        received += part
    return received
