"""The network interface at which gloo listens, and by which other ranks reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import logging
import os
import socket
import struct
from contextlib import suppress
from typing import Any

from torch.distributed import distributed_c10d as c10d

from bagua._core.group import environment as env
from bagua._core.group.rendezvous import append, forget, lines_in, read, tcp_store

_VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_PLACES = "listens"
_MOST_RANKS = 64  # that tell their places
_MOST_NAMED = 4  # ranks whose places an error names
_LONGEST = 60  # characters of a part of a place
_NO_ADDRESS = "no address"

_log = logging.getLogger("bagua")
_chosen = ""


def choose_interface(store: c10d.Store) -> None:
    """Have gloo listen at the interface by which this process reaches ``store``.

    A variable of the user's is left alone, and a store of this host says nothing about the way to
    other machines: gloo then takes the address of the host name.
    """
    global _chosen
    if _VARIABLE in os.environ:
        return
    address = _address_towards(tcp_store(store))
    for name, own in _ipv4_addresses().items():
        if own == address and not _is_loopback(own):
            os.environ[_VARIABLE] = _chosen = name
            _log.info("gloo uses interface %s (%s), which leads to the job's store", name, own)
            return


def forget_interface() -> None:
    """Undo ``choose_interface``: another job may have another store."""
    global _chosen
    if _chosen and os.environ.get(_VARIABLE) == _chosen:
        del os.environ[_VARIABLE]
    _chosen = ""


def tell_place(store: c10d.Store, rank: int) -> None:
    """Write where this rank listens, for the errors of ranks that cannot connect."""
    if rank < _MOST_RANKS:
        place = [str(rank), f"{socket.gethostname()}, node {env.get_node_rank()}", *_own_place()]
        append(store, _PLACES, json.dumps([text[:_LONGEST] for text in place]) + "\n")


def forget_places(store: c10d.Store) -> None:
    """One rank calls it once all are connected."""
    forget(store, [_PLACES])


def where_ranks_listen(store: c10d.Store, size: int) -> str:
    """What is wrong with the addresses that ranks have told, for an error; may be empty."""
    told: dict[int, list[str]] = {}
    with suppress(RuntimeError, ValueError):  # the store may have gone with the ranks
        for line in read(store, _PLACES).splitlines()[:_MOST_RANKS]:
            rank, host, address, reason = lines_in(line, _PLACES)
            told[int(rank)] = [host, address, reason]
    return _fault_of(told, several_nodes=env.get_local_size() < size)


def _fault_of(places: dict[int, list[str]], *, several_nodes: bool) -> str:
    """``places``: by rank its host, address and the reason for that address."""
    remedy = f"set {_VARIABLE} to the interface that the machines share. "
    nowhere = [rank for rank, (_, address, _) in places.items() if address == _NO_ADDRESS]
    if nowhere:
        return f"{_listed(places, nowhere)}: {remedy}"
    local = [rank for rank, (_, address, _) in places.items() if _is_loopback(address)]
    if local and several_nodes:
        return f"{_listed(places, local)}, which no other machine reaches: {remedy}"
    if len({address.rpartition(".")[0] for _, address, _ in places.values()}) > 1:
        return f"{_listed(places, sorted(places))}; {_VARIABLE} names the interface. "
    return ""


def _listed(places: dict[int, list[str]], ranks: list[int]) -> str:
    texts = []
    for rank in ranks[:_MOST_NAMED]:
        host, address, reason = (
            "".join(letter for letter in text[:_LONGEST] if letter.isprintable())
            for text in places[rank]
        )
        texts.append(f"rank {rank} ({host}) listens at {address} ({reason})")
    return ", ".join(texts) + (" and others" if len(ranks) > _MOST_NAMED else "")


def own_address() -> str:
    """At which gloo listens in this process; OSError: there is none."""
    address, reason = _own_place()
    if address == _NO_ADDRESS:
        raise OSError(f"{address}: {reason}")
    return address


def _own_place() -> tuple[str, str]:
    """Address at which gloo listens in this process, and why."""
    name = os.environ.get(_VARIABLE, "").split(",")[0]
    if name:
        by = "the way to the job's store" if name == _chosen else f"{_VARIABLE}={name}"
        return _ipv4_addresses().get(name, _NO_ADDRESS), by
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname()), "the address of its host name"
    return "127.0.0.1", "its host name has no address"


def _address_towards(store: Any) -> str:
    with suppress(OSError, AttributeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((store.host, store.port))  # sends nothing
        return str(one.getsockname()[0])
    return ""


def _ipv4_addresses() -> dict[str, str]:
    """The first IPv4 address of every interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking, _ADDRESS, struct.pack("16s24x", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _is_loopback(address: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False
