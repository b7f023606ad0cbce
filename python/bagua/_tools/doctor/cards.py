"""Description that each rank gives of itself."""

from __future__ import annotations

import os
import platform
import socket
from typing import Any, NamedTuple

import torch

import bagua
from bagua import _C, _build
from bagua._core.group import environment as env
from bagua._tools.interfaces import gloo_address, interfaces
from bagua._tools.report import architectures, printable

__all__ = ["Card", "card_from", "own_card"]

_LONGEST = 200  # characters of a text that another rank has written


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
    """The card of this process, which is to be given its port."""
    address, reason = gloo_address()
    own = [one for one in interfaces() if address in one.addresses]
    return Card(
        host=socket.gethostname(),
        node=env.get_node_rank(),
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
    """The card that a rank has written as a JSON object; None if it is none."""
    kinds = {"node": int, "pid": int, "port": int, "mtu": int}
    if not isinstance(word, dict) or word.keys() != set(Card._fields):
        return None
    if not all(type(value) is kinds.get(name, str) for name, value in word.items()):
        return None
    fields: dict[str, Any] = {
        k: printable(v[:_LONGEST]) if isinstance(v, str) else v for k, v in word.items()
    }
    return Card(**fields)
