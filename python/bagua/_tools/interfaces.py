"""Network interfaces of this machine, and the address that gloo chooses."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Interface", "gloo_address", "interfaces"]

# Requests of Linux's ioctl about an interface, and a flag of the answer.
_ADDRESS, _FLAGS, _MTU = 0x8915, 0x8913, 0x8921
_UP = 0x1
_LINK_LOCAL = "20"  # scope of an address in /proc/net/if_inet6
_IPV6 = Path("/proc/net/if_inet6")


class Interface(NamedTuple):
    """A network interface; ``mtu`` is the largest packet in bytes, None: not told."""

    name: str
    up: bool
    addresses: list[str]
    mtu: int | None


def interfaces() -> list[Interface]:
    """All interfaces, in the system's order. Link-local IPv6 addresses are left out."""
    names = [name for _, name in socket.if_nameindex()]
    ipv6 = _ipv6_addresses()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return [_interface(asking, name, ipv6.get(name, [])) for name in names]


def gloo_address(variables: dict[str, str] | None = None) -> tuple[str | None, str]:
    """Address at which gloo listens in this process, and where it comes from.

    The address is None where ``GLOO_SOCKET_IFNAME`` names no interface that has one. ``variables``:
    the environment; None: that of the process.
    """
    name = (os.environ if variables is None else variables).get("GLOO_SOCKET_IFNAME", "")
    name = name.split(",")[0]
    if name:
        found = [one for one in interfaces() if one.name == name]
        address = found[0].addresses[0] if found and found[0].addresses else None
        return address, f"GLOO_SOCKET_IFNAME={name}"
    host = socket.gethostname()
    try:
        places = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        places = []
    for family, _, _, _, place in places:
        address = str(place[0])
        if _can_bind(family, address):
            return address, f"address of the host name {host}"
    return "127.0.0.1", f"the host name {host} has no address of this machine"


def _interface(asking: socket.socket, name: str, ipv6: list[str]) -> Interface:
    flags = _ask(asking, name, _FLAGS, "h")
    mtu = _ask(asking, name, _MTU, "i")
    address = _ask(asking, name, _ADDRESS, "4x4s")
    own = [] if address is None else [socket.inet_ntoa(address)]
    return Interface(name, bool(flags and flags & _UP), own + ipv6, mtu)


def _ask(asking: socket.socket, name: str, request: int, layout: str) -> Any:
    question = struct.pack("16s24x", name.encode())
    try:
        answer = fcntl.ioctl(asking.fileno(), request, question)
    except OSError:  # no IPv4 address, or the interface has just gone
        return None
    return struct.unpack_from(layout, answer, 16)[0]


def _ipv6_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines = _IPV6.read_text().splitlines() if _IPV6.exists() else []
    for address, _, _, scope, _, name in (line.split() for line in lines):
        if scope != _LINK_LOCAL:
            text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
            found.setdefault(name, []).append(text)
    return found


def _can_bind(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
