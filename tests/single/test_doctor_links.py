"""Rates of a link as its two ends measure them, without a network."""

import socket
import threading
import time

from bagua._tools.doctor import links

PIECES, PIECE, PAUSE = 10, 4096, 0.005


def test_a_receiver_that_gets_no_core_does_not_find_the_link_too_fast(monkeypatch):
    ours, theirs = socket.socketpair()

    def send():
        for _ in range(1 + links._TRANSFERS):
            theirs.sendall((PIECES * PIECE).to_bytes(8, "big"))
            for _ in range(PIECES):
                time.sleep(PAUSE)
                theirs.sendall(bytes(PIECE))
            theirs.recv(1)

    received = links._receive

    def late(connection, size):
        got = received(connection, size)
        time.sleep(0.8 * PIECES * PAUSE)
        return got

    monkeypatch.setattr(links, "_receive", late)
    sender = threading.Thread(target=send)
    with ours, theirs:
        ours.settimeout(20)
        theirs.settimeout(20)
        sender.start()
        rate = links._take_in(ours)
        sender.join()
    assert 0 < rate <= PIECE / PAUSE
