"""TCP connections between ranks, as gloo makes them: opened, timed and filled, pair by pair."""

from __future__ import annotations

import hmac
import itertools
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from bagua import _C
from bagua._core.group.environment import congestion_control_of_far_ranks
from bagua._core.group.rendezvous import whole
from bagua._tools.meeting import finite, mapping, text
from bagua._tools.step_cost import FAR

_GREETING = struct.Struct("!32sII")  # secret of the job, rank that connects, rank that is meant
_NUMBER = struct.Struct("!d")
_FEWEST_TRIPS, _MOST_TRIPS = 5, 32  # from which the latency and the clocks are taken
_SECONDS_OF_TRIPS = 1.0  # after which the fewest are enough
_FIRST_BYTES = 128 * 1024  # of the first transfer; the next ones are up to _GROWTH times as large
_GROWTH = 4
_SECONDS = 0.1  # that a transfer which counts takes at least: bursts of a link are over by then
_TRIPS_OF_TRANSFER = 6  # that it takes at least: TCP sends more from trip to trip at first
_TRANSFERS = 3  # that count: the median of them
_BLOCK = 1 << 20
_DONE = b"d"
_LAST = b"l"
_TCP_INFO = struct.Struct("=100xI52xI")  # of Linux: segments sent again, segments sent with data


class Place(NamedTuple):
    address: str
    port: int


class Measured(NamedTuple):
    """A link as one of its ends saw it.

    Attributes:
        latency: half a round trip, in seconds, the median.
        ahead: seconds by which the other end's clock is ahead.
        sent: bytes a second towards the other end; received: from it.
        again: share of the segments that this end had to send again, from 0 to 1.
    """

    latency: float
    ahead: float
    sent: float
    received: float
    again: float = 0.0


class Post:
    """This rank's listening socket, and its connections to other ranks.

    Connections are taken by separate threads, for as long as the object is open; those without
    the job's secret are closed. ``timeout``, in seconds, holds for each step.
    """

    def __init__(self, address: str, rank: int, secret: bytes, timeout: float) -> None:
        self._rank = rank
        self._secret = secret
        self._timeout = timeout
        self._sockets = _C.OpenedSockets()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=family, backlog=512)
        self._sockets.give_up_after(timeout)  # and the connections that are accepted
        self.place = Place(address, self._listening.getsockname()[1])
        self._taken: dict[int, socket.socket] = {}
        self._opened: dict[int, socket.socket] = {}
        self._arrival = threading.Condition()
        threading.Thread(target=self._take_all, name="bagua-doctor-post", daemon=True).start()

    def close(self) -> None:
        self._listening.close()
        for connection in [*self._taken.values(), *self._opened.values()]:
            connection.close()

    def open_all(self, places: dict[int, Place]) -> dict[int, str]:
        """Connect to every rank of ``places``, all at once; why not, for those that failed."""
        failures: dict[int, str] = {}

        def connect(other: int, place: Place) -> None:
            try:
                self._opened[other] = self._connect(other, place)
            except OSError as error:
                failures[other] = _reason(error, self._timeout)

        threads = [
            threading.Thread(target=connect, args=item, daemon=True) for item in places.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * self._timeout + 1.0)
        self._sockets.give_up_after(self._timeout)
        for other in places:
            if other not in self._opened:
                failures.setdefault(other, f"no answer within {2 * self._timeout:g} s")
        return failures

    def connection(self, other: int) -> socket.socket:
        """The connection that the lower rank has opened."""
        if self._rank < other:
            if other not in self._opened:
                raise ConnectionError(f"there is no connection to rank {other}")
            return self._opened[other]
        with self._arrival:
            if not self._arrival.wait_for(lambda: other in self._taken, self._timeout):
                raise TimeoutError("timed out")
            return self._taken[other]

    def _connect(self, other: int, place: Place) -> socket.socket:
        connection = socket.create_connection(place, self._timeout)
        try:
            connection.settimeout(self._timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_GREETING.pack(self._secret, self._rank, other))
            if _receive(connection, 1) != _DONE:
                raise OSError("something else listens there")
        except OSError:
            connection.close()
            raise
        return connection

    def _take_all(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(self._timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secret, other, meant = _GREETING.unpack(_receive(connection, _GREETING.size))
            if not hmac.compare_digest(secret, self._secret) or meant != self._rank:
                raise OSError("a stranger")
            connection.sendall(_DONE)
        except OSError:
            connection.close()
            return
        with self._arrival:
            self._taken[other] = connection
            self._arrival.notify_all()


def measure(connection: socket.socket, first: bool, most_bytes: int) -> Measured:
    """Measure a link from this end; the other end calls it with the opposite ``first``.

    1. Round trips, each answered by the other end's clock, in both directions.
    2. Transfers in each direction, larger and larger until one takes a tenth of a second and six
       round trips or has ``most_bytes`` bytes, then three of that size, of which the median counts.
       The receiver times the last half of each, and tells the sender.
    """
    if first:
        latency, ahead = _ask_clock(connection)
        _tell_clock(connection)
        sent, again = _send(connection, most_bytes, latency)
        received = _take_in(connection)
    else:
        _tell_clock(connection)
        latency, ahead = _ask_clock(connection)
        received = _take_in(connection)
        sent, again = _send(connection, most_bytes, latency)
    return Measured(latency, ahead, sent, received, again)


def measured_from(word: Any) -> Measured | str:
    """What an end of a link has told: how fast the link is, or why it could not be measured."""
    if isinstance(word, str):
        return text(word)
    least = {"latency": 0.0, "sent": 0.0, "received": 0.0, "again": 0.0}
    told = mapping(word, set(Measured._fields)).items()
    return Measured(**{name: finite(value, least.get(name, -1e18)) for name, value in told})


def failures_from(word: Any, ranks: int) -> dict[int, str]:
    """The ranks that one has not reached, with the reasons."""
    numbers = {str(rank): rank for rank in range(ranks)}
    return {numbers[other]: text(reason) for other, reason in word.items()}


def pairs_from(word: Any, ranks: int) -> list[tuple[int, int]] | None:
    """The links that are measured in a round; None: there is no further round."""
    if word is None:
        return None
    if type(word) is not list:
        raise ValueError(word)
    return [(whole(a, ranks), whole(b, ranks)) for a, b in word]


def _ask_clock(connection: socket.socket) -> tuple[float, float]:
    trips: list[tuple[float, float]] = []
    begun = time.perf_counter()
    last = False
    while not last:
        number = len(trips) + 1
        late = time.perf_counter() - begun > _SECONDS_OF_TRIPS
        last = number == _MOST_TRIPS or (number >= _FEWEST_TRIPS and late)
        wall, asked = time.time(), time.perf_counter()
        connection.sendall(_LAST if last else _DONE)
        (theirs,) = _NUMBER.unpack(_receive(connection, _NUMBER.size))
        trip = time.perf_counter() - asked
        trips.append((trip, theirs - (wall + trip / 2)))
    trips.sort()
    return trips[len(trips) // 2][0] / 2, trips[0][1]  # the fastest trip bounds the clocks best


def _tell_clock(connection: socket.socket) -> None:
    for _ in range(_MOST_TRIPS):
        word = _receive(connection, 1)
        connection.sendall(_NUMBER.pack(time.time()))
        if word == _LAST:
            return


def _send(connection: socket.socket, most_bytes: int, latency: float) -> tuple[float, float]:
    """Bytes a second, and the share of segments that were sent again."""
    if latency >= FAR and (wanted := congestion_control_of_far_ranks()):  # as in a training
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted.encode())
    least = max(_SECONDS, _TRIPS_OF_TRANSFER * 2 * latency)
    size = min(_FIRST_BYTES, most_bytes)
    while True:
        begun = time.perf_counter()
        _send_bytes(connection, size)
        elapsed = time.perf_counter() - begun
        if size == most_bytes or elapsed >= least:
            break
        # Not much longer than it takes, on links where that are seconds.
        growth = min(_GROWTH, max(_GROWTH * _SECONDS, 1.25 * least) / elapsed)
        size = min(int(max(2.0, growth) * size), most_bytes)
    again, segments = _segments(connection)
    rate = statistics.median(_send_bytes(connection, size) for _ in range(_TRANSFERS))
    more_again, more_segments = _segments(connection)
    _send_bytes(connection, 0)  # no other follows
    return rate, min(1.0, (more_again - again) / max(1, more_segments - segments))


def _segments(connection: socket.socket) -> tuple[int, int]:
    """Segments that were sent again, and all with data; zeros where the kernel does not tell."""
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        again, segments = _TCP_INFO.unpack(told)
    except (OSError, struct.error):
        return 0, 0
    return again, segments


def _send_bytes(connection: socket.socket, size: int) -> float:
    block = memoryview(bytes(min(size, _BLOCK)))
    connection.sendall(size.to_bytes(8, "big"))
    for start in range(0, size, _BLOCK):
        connection.sendall(block[: size - start])
    return float(_NUMBER.unpack(_receive(connection, _NUMBER.size))[0])


def _take_in(connection: socket.socket) -> float:
    rates: list[float] = []
    while True:
        begun = time.perf_counter()
        size = int.from_bytes(_receive(connection, 8), "big")
        rate = _rate_of_arrival(connection, size, begun) if size else 0.0
        connection.sendall(_NUMBER.pack(rate))
        if not size:
            return statistics.median(rates[-_TRANSFERS:])
        rates.append(rate)


def _rate_of_arrival(connection: socket.socket, size: int, begun: float) -> float:
    """Bytes a second of about the last half of a transfer.

    The clock starts when everything that had arrived was read: a rank that gets no core for a while
    finds much of the rest there at once, and the link too fast. Where the third quarter has no such
    moment, the whole transfer counts, from ``begun``, before the other end sent.
    """
    left = timed = size
    for piece in _received(connection, size):
        asked = min(left, _BLOCK)
        left -= len(piece)
        if timed == size and len(piece) < asked and size <= 4 * left <= 2 * size:
            timed, begun = left, time.perf_counter()
    return timed / (time.perf_counter() - begun)


def _received(connection: socket.socket, size: int) -> Iterable[bytes]:
    while size:
        piece = connection.recv(min(size, _BLOCK))
        if not piece:
            raise ConnectionResetError("the other end has closed the connection")
        size -= len(piece)
        yield piece


def _receive(connection: socket.socket, size: int) -> bytes:
    return b"".join(_received(connection, size))


def _reason(error: OSError, timeout: float) -> str:
    late = isinstance(error, TimeoutError)
    return f"no answer within {timeout:g} s" if late else error.strerror or str(error)


def rounds_of_pairs(
    nodes: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """Rounds that hold each of ``pairs`` once, and no node twice, so links are measured alone.

    ``nodes``: node of every rank.
    """
    left = list(pairs)
    rounds = []
    while left:
        busy: set[int] = set()
        chosen, later = [], []
        for pair in left:
            touched = {nodes[rank] for rank in pair}
            if busy & touched:
                later.append(pair)
            else:
                busy |= touched
                chosen.append(pair)
        rounds.append(chosen)
        left = later
    return rounds


def all_pairs(size: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(size), 2))
