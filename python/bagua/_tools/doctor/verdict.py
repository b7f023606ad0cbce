"""What each rank says of itself, and findings from that and the measurements."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import bagua
from bagua import _C, _build
from bagua._core.group import environment as env
from bagua._core.group.rendezvous import whole
from bagua._tools.doctor.links import Measured
from bagua._tools.meeting import mapping, text
from bagua._tools.report import architectures, gloo_address, interfaces

Pair = tuple[int, int]

_CLOCK_SECONDS = 1.0  # by which clocks may differ without a remark
_UNEQUAL = 2.0  # ratio of the directions of a link between nodes from which there is a remark


class Card(NamedTuple):
    """One rank: its place, its interface and its versions.

    Attributes:
        address: at which gloo listens; empty: ``reason`` names an interface without one.
        port: of the doctor's own listening socket.
        interface, mtu: that has the address; empty and 0 where none has it.
    """

    host: str
    node: int
    pid: int
    address: str
    reason: str
    port: int
    interface: str
    mtu: int
    device: str
    bagua: str
    built_for: str
    torch: str
    python: str
    loops: str
    kernels: str


def own_card(device: str) -> Card:
    address, reason = gloo_address()
    own = [one for one in interfaces() if address in one.addresses]
    return Card(
        host=socket.gethostname(),
        node=env.get_node_number(),
        pid=os.getpid(),
        address=address or "",
        reason=reason,
        port=0,
        interface=own[0].name if own else "",
        mtu=(own[0].mtu or 0) if own else 0,
        device=device,
        bagua=bagua.__version__,
        built_for=_build.TORCH_VERSION,
        torch=str(torch.__version__),
        python=platform.python_version(),
        loops=_C.instruction_set(),
        kernels=architectures(_build.CUDA_ARCHITECTURES),
    )


def card_from(word: Any) -> Card | None:
    numbers = {"node": 1 << 31, "pid": 1 << 31, "port": 1 << 16, "mtu": 1 << 31}
    try:
        fields: dict[str, Any] = {
            name: whole(value, numbers[name]) if name in numbers else text(value)
            for name, value in mapping(word, set(Card._fields)).items()
        }
        card = Card(**fields)
        if card.address:
            ipaddress.ip_address(card.address)
    except ValueError:
        return None
    return card


class Finding(NamedTuple):
    """One sentence about the cluster; ``broken``: training would fail or suffer."""

    text: str
    broken: bool = True


def findings_of_cards(cards: Mapping[int, Card]) -> list[Finding]:
    found = [
        Finding(f"rank {rank} ({card.host}): {card.reason} is not an interface with an address")
        for rank, card in cards.items()
        if not card.address
    ]
    for field, what, broken in (
        ("bagua", "version of bagua", True),
        ("torch", "version of torch", True),
        ("built_for", "torch that bagua was built for", True),
        ("device", "device", True),
        ("python", "version of Python", False),
        ("kernels", "CUDA kernels", False),
        ("mtu", "MTU of the interface", False),
    ):
        by_value: dict[str, list[int]] = {}
        for rank, card in cards.items():
            if card.address or field != "mtu":
                by_value.setdefault(str(getattr(card, field)), []).append(rank)
        if len(by_value) > 1:
            parts = (f"{value} on {ranks_text(ranks)}" for value, ranks in by_value.items())
            found.append(Finding(f"ranks differ in the {what}: {', '.join(parts)}", broken))
    return found


def findings_of_links(
    cards: Mapping[int, Card],
    unreachable: Mapping[Pair, str],
    measured: Mapping[Pair, Measured],
    broke: Mapping[Pair, str],
    tolerance: float,
    least: float,
) -> list[Finding]:
    """Links that are cut, break under load, are slow or have unequal directions.

    Args:
        unreachable: by (rank that connects, rank that it did not reach), the reason.
        measured: by pair, as the lower rank saw it; broke: the reason why it could not be.
        tolerance: how many times slower than the fastest link between nodes a link may be.
        least: bytes a second that every link must have.
    """
    found = _cut(cards, unreachable)
    found += [
        Finding(
            f"the link between ranks {a} and {b} ({hosts(cards, (a, b))}) is up, but fails under "
            f"load: {reason}. Compare the MTU of the interfaces and of what is between them",
        )
        for (a, b), reason in broke.items()
    ]
    found += _slow(cards, measured, tolerance, least)
    found += _unequal(cards, measured)
    clocks = {b: link.ahead for (a, b), link in measured.items() if a == 0}
    found += [
        Finding(
            f"the clock of rank {rank} ({cards[rank].host}) is {abs(ahead):.1f} s "
            f"{'ahead of' if ahead > 0 else 'behind'} that of rank 0: times in logs do not compare",
            broken=False,
        )
        for rank, ahead in clocks.items()
        if abs(ahead) > _CLOCK_SECONDS
    ]
    return found


def slowest_direction(link: Measured) -> float:
    return min(link.sent, link.received)


def speed_text(speed: float) -> str:
    return f"{speed / 1e6:.1f} MB/s ({speed / 125e3:.0f} Mbit/s)"


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def hosts(cards: Mapping[int, Card], pair: Pair) -> str:
    return " and ".join(f"{cards[rank].host} at {cards[rank].address}" for rank in pair)


def _cut(cards: Mapping[int, Card], unreachable: Mapping[Pair, str]) -> list[Finding]:
    both = sorted({(a, b) for a, b in unreachable if a < b and (b, a) in unreachable})
    lost_links = Counter(rank for pair in both for rank in pair)
    alone = [rank for rank, count in lost_links.items() if count == len(cards) - 1 > 1]
    if len(alone) == len(cards):  # nobody reaches anybody: each link is named
        alone = []
    found = [
        Finding(
            f"rank {rank} ({cards[rank].host}) is cut off: no connection between it and "
            f"{ranks_text([other for other in cards if other != rank])}, in either direction "
            f"({next(unreachable[pair] for pair in unreachable if rank in pair)})"
            f"{_advice(cards[rank])}",
        )
        for rank in alone
    ]
    found += [
        Finding(
            f"the link between ranks {a} and {b} ({hosts(cards, (a, b))}) is cut: no connection "
            f"in either direction ({unreachable[a, b]}){_advice(cards[a], cards[b])}",
        )
        for a, b in both
        if a not in alone and b not in alone
    ]
    found += [
        Finding(
            f"rank {a} cannot open a connection to rank {b} ({hosts(cards, (a, b))}): {reason}. "
            f"The other direction works: look for a firewall before rank {b}",
        )
        for (a, b), reason in unreachable.items()
        if (b, a) not in unreachable
    ]
    return found


def _advice(*cards: Card) -> str:
    for card in cards:
        if card.address and ipaddress.ip_address(card.address).is_loopback:
            return (
                f". {card.host} listens at {card.address} ({card.reason}), which no other machine "
                "reaches: set GLOO_SOCKET_IFNAME to the interface that the machines share"
            )
    return ". Check the interfaces, the cable, the routes and the firewall between them"


def _slow(
    cards: Mapping[int, Card], measured: Mapping[Pair, Measured], tolerance: float, least: float
) -> list[Finding]:
    speeds = {pair: slowest_direction(link) for pair, link in measured.items()}
    between = {
        pair: speed for pair, speed in speeds.items() if cards[pair[0]].node != cards[pair[1]].node
    }
    fastest = max(between.values(), default=0.0)
    slow = {pair: speed for pair, speed in between.items() if speed * tolerance < fastest}
    slow |= {pair: speed for pair, speed in speeds.items() if speed < least}
    links = Counter(rank for pair in between for rank in pair)
    slow_links = Counter(rank for pair in slow if pair in between for rank in pair)
    alike = f"the fastest link between nodes has {speed_text(fastest)}"
    ranks = [rank for rank, count in sorted(slow_links.items()) if count == links[rank] > 1]
    if len(ranks) == len(links):  # no rank is the reason
        ranks = []
    found = []
    if ranks:
        own = [speed for pair, speed in slow.items() if set(pair) & set(ranks)]
        names = ", ".join(sorted({cards[rank].host for rank in ranks}))
        found.append(
            Finding(
                f"all links between {ranks_text(ranks)} ({names}) and other nodes are slow: "
                f"{speed_text(min(own))} to {speed_text(max(own))}; {alike}",
            )
        )
    found += [
        Finding(
            f"the link between ranks {a} and {b} ({hosts(cards, (a, b))}) is slow: "
            f"{speed_text(speed)}{f'; {alike}' if between else ''}",
        )
        for (a, b), speed in slow.items()
        if a not in ranks and b not in ranks
    ]
    return found


def _unequal(cards: Mapping[int, Card], measured: Mapping[Pair, Measured]) -> list[Finding]:
    """Links between nodes that are much faster in one direction."""
    return [
        Finding(
            f"the link between ranks {a} and {b} ({hosts(cards, (a, b))}) has unequal directions: "
            f"{speed_text(link.sent)} from rank {a} to rank {b}, {speed_text(link.received)} back",
            broken=False,
        )
        for (a, b), link in measured.items()
        if cards[a].node != cards[b].node
        and max(link.sent, link.received) > _UNEQUAL * slowest_direction(link)
    ]
