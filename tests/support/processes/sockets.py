"""The TCP sockets on which a process listens, as Linux's /proc has them."""

import ipaddress
import os
from pathlib import Path

__all__ = ["listening"]

LISTEN = "0A"


def listening():
    """{inode: (address, port)} of this process's listening TCP sockets, of IPv4 and IPv6."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:  # that of the listing itself
            continue
        if target.startswith("socket:["):
            mine.add(target[len("socket:[") : -1])
    found = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else []:
            _, local, _, state, *rest = line.split()
            if state == LISTEN and rest[5] in mine:
                address, port = local.split(":")
                found[rest[5]] = (_address(address), int(port, 16))
    return found


def _address(text):
    """Words of four bytes, each in the machine's (little-endian) order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
