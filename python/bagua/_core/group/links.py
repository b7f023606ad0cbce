"""Which members of an elastic group reach each other, over TCP at the address of gloo.

Note [One bad link]
Where two members have lost the link between them and reach everyone else, the group goes on without
one of the two. After a round that failed each member listens for the time of the change, and sends
some kilobytes to all others, which return them. A link is bad if both of its ends say so: one of
them may be behind a firewall that lets connections out alone. The member with the most bad links
goes, the higher one of two; and so on until no bad link is left.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from bagua._core.group.interfaces import own_address

#: Seconds for a connection, and as many for the bytes.
PATIENCE = 5.0
_THREADS = 32  # at each end
_BYTES = 16 * 1024  # more than a packet: small ones may pass where large ones are lost
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


class Door:
    """Returns bytes to those that know the token, until it is closed. At most 32 at a time."""

    def __init__(self) -> None:
        self._listening = socket.create_server((own_address(), 0), backlog=512)
        address, port = self._listening.getsockname()
        self.place = Place(address, port, secrets.token_hex(_TOKEN // 2))
        self._threads = ThreadPoolExecutor(_THREADS + 1, "bagua-door")
        self._threads.submit(self._serve)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # which ends accept()
        self._listening.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        with suppress(OSError, RuntimeError):  # it is closed
            while True:
                self._threads.submit(self._answer, self._listening.accept()[0])

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(PATIENCE)
            if hmac.compare_digest(_receive(connection, _TOKEN), self.place.token.encode()):
                connection.sendall(_receive(connection, _BYTES))


def out_of_reach(places: Mapping[int, Place]) -> list[int]:
    """The members that do not return what they are sent; asks all at once."""
    with ThreadPoolExecutor(_THREADS, "bagua-links") as threads:
        found = list(threads.map(_reaches, places.values()))
    return [member for member, reached in zip(places, found, strict=True) if not reached]


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
