"""Rates of a link as its receiver measures them, without a network, under a manual clock."""

import struct
from types import SimpleNamespace

import pytest
from bagua._tools.doctor import links

PIECE = 4096
RATE = 25e6


class Link:
    """The receiver's end of a link: transfers of which the first `burst` bytes come at once, and
    the others in pieces, at `rate` bytes a second. After the size of each, the receiver is away for
    `late` seconds."""

    def __init__(self, monkeypatch, transfers, late=0.0):
        self.now = 0.0
        self.transfers = [*transfers, (0, 0, RATE)]
        self.late = late
        self.told = []
        monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self._begin()

    def _begin(self):
        size, burst, rate = self.transfers.pop(0)
        pieces = range(1, (size - burst) // PIECE + 1)
        self.header = size.to_bytes(8, "big")
        self.arrivals = [(self.now, burst)] if burst else []
        self.arrivals += [(self.now + number * PIECE / rate, PIECE) for number in pieces]

    def recv(self, most):
        if self.header:
            header, self.header = self.header, b""
            self.now += self.late
            return header
        self.now = max(self.now, self.arrivals[0][0])
        taken = 0
        while self.arrivals and self.arrivals[0][0] <= self.now and taken < most:
            when, count = self.arrivals.pop(0)
            fits = min(count, most - taken)
            taken += fits
            if count > fits:
                self.arrivals.insert(0, (when, count - fits))
        return bytes(taken)

    def sendall(self, data):
        self.told.append(*struct.unpack("!d", data))
        if self.transfers:
            self._begin()


def test_a_burst_does_not_count(monkeypatch):
    size = 256 * PIECE
    link = Link(monkeypatch, [(size, size // 3 // PIECE * PIECE, RATE)] * 4)
    assert links._take_in(link) == pytest.approx(RATE)
    assert link.told == [pytest.approx(RATE)] * 4 + [0.0]


def test_a_receiver_that_gets_no_core_does_not_find_the_link_too_fast(monkeypatch):
    size = 256 * PIECE
    for away in (0.1, 0.4, 0.6, 0.9, 2.0):
        link = Link(monkeypatch, [(size, 0, RATE)] * 4, late=away * size / RATE)
        assert 0 < links._take_in(link) <= RATE * 1.02  # it starts inside a piece


def test_the_median_of_the_last_transfers_counts(monkeypatch):
    sizes = [(64 * PIECE, 32 * PIECE, RATE)] + [
        (256 * PIECE, 0, rate) for rate in (RATE, 83e6, 24e6)
    ]
    assert links._take_in(Link(monkeypatch, sizes)) == pytest.approx(RATE)
