"""Clients that have no business here: `python stray_clients.py PORT...` until its input ends.

Up to MOST_ROUNDS times every kind of client comes to every port of 127.0.0.1. Writes "begun" after
the first time round, and at the end as JSON how many of each kind have connected to each port.
"""

import contextlib
import json
import random
import select
import socket
import struct
import sys

SEED = 5
#: gloo keeps the socket of every stranger who has said eight bytes, and aborts its process when
#: there are no descriptors left (docs/security.md): a test must stay below their usual number.
MOST_ROUNDS = 40
SECONDS_BETWEEN_ROUNDS = 0.02
#: Per port; they stay open until the end.
MOST_IDLE = 30
TLS_HELLO = bytes.fromhex(
    "16030100510100004d0303" + "ab" * 32 + "000004130113020100001f"
    "0000000e000c0000096c6f63616c686f7374002b0003020304000a00040002001d"
)


def random_bytes(client, chance):
    client.sendall(chance.randbytes(chance.randrange(1, 4096)))


def tls_hello(client, chance):
    client.sendall(TLS_HELLO)


def http(client, chance):
    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


def huge_lengths(client, chance):
    """What a message with counts of up to 2^64 - 1 would look like to a binary protocol."""
    client.sendall(struct.pack("<BQQ", chance.randrange(20), 2**64 - 1, 2**63) * 8)


def connect_and_close(client, chance):
    pass


KINDS = [random_bytes, tls_hello, http, huge_lengths, connect_and_close]


def visit(port, kind, chance):
    """Whether the client of this kind got a connection."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as client:
        with contextlib.suppress(OSError):  # thrown out while it spoke
            kind(client, chance)
        return 1
    return 0


def half_open(port, chance, idle):
    """A client that says a few bytes, or nothing, and stays."""
    if len(idle) >= MOST_IDLE:
        return 0
    with contextlib.suppress(OSError):
        idle.append(socket.create_connection(("127.0.0.1", port), 1.0))
        idle[-1].sendall(chance.randbytes(chance.randrange(4)))
        return 1
    return 0


def main(ports):
    chance = random.Random(SEED)
    counts = {
        port: dict.fromkeys([*(kind.__name__ for kind in KINDS), "half_open"], 0) for port in ports
    }
    idle = {port: [] for port in ports}
    rounds = 0
    while not select.select([sys.stdin], [], [], SECONDS_BETWEEN_ROUNDS)[0]:
        if rounds == MOST_ROUNDS:
            continue
        for port in ports:
            for kind in KINDS:
                counts[port][kind.__name__] += visit(port, kind, chance)
            counts[port]["half_open"] += half_open(port, chance, idle[port])
        rounds += 1
        if rounds == 1:
            print("begun", flush=True)
    print(json.dumps({"rounds": rounds, "counts": counts}))


if __name__ == "__main__":
    main([int(port) for port in sys.argv[1:]])
