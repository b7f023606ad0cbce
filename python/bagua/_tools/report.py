"""``bagua report``: versions, processors, network and settings of this machine."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import socket
import struct
import textwrap
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bagua
from bagua import _build

#: The variables that bagua reads.
VARIABLES = (
    "BAGUA_AUTOTUNE",
    "BAGUA_CHECKSUM",
    "BAGUA_CHECK_WEIGHTS_EVERY",
    "BAGUA_COMM",
    "BAGUA_CONGESTION_CONTROL",
    "BAGUA_DEFAULT_BUCKET_SIZE",
    "BAGUA_LANES",
    "BAGUA_MAILBOX_SECRET",
    "BAGUA_NCCL_LIBRARY",
    "BAGUA_STARTED_HOROVOD",
    "BAGUA_STRAGGLER_SECONDS",
    "BAGUA_TOP",
)
_OTHERS = re.compile(
    r"GLOO_.*|NCCL_.*|TORCH_DISTRIBUTED_DEBUG|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES"
)
_FRAMEWORKS = ("numpy", "lightning", "pytorch-lightning", "accelerate", "transformers", "horovod")
_COLUMNS = 80
_LABEL = 16

# Requests of Linux's ioctl about an interface, and a flag of the answer.
_ADDRESS, _FLAGS, _MTU = 0x8915, 0x8913, 0x8921
_UP = 0x1
_LINK_LOCAL = "20"  # scope of an address in /proc/net/if_inet6
_IPV6 = Path("/proc/net/if_inet6")


def report_text(error: ImportError | None = None) -> str:
    """The report, of at most 80 columns; with ``error`` without what needs the extension."""
    parts: list[tuple[str, Callable[[], list[str]]]] = [
        ("bagua", _package),
        ("torch", _torch),
        ("Python", lambda: [f"{platform.python_version()}, {platform.platform()}"]),
        ("packages", _packages),
        ("processor", _processor),
        *(_of_the_extension() if error is None else []),
        ("CUDA kernels", lambda: [architectures(_build.CUDA_ARCHITECTURES)]),
        ("GPUs", _gpus),
        *([("NCCL", _nccl)] if error is None else []),
        ("network", _network),
        ("gloo listens at", _gloo),
        ("variables", _variables),
        *([("does not work", lambda: str(error).splitlines())] if error is not None else []),
    ]
    lines: list[str] = []
    for label, values in parts:
        for value in values():
            lines += textwrap.wrap(
                printable(value),
                _COLUMNS,
                initial_indent=f"{label:<{_LABEL}} ",
                subsequent_indent=" " * (_LABEL + 1),
                break_on_hyphens=False,
                break_long_words=False,
            )
            label = ""
    return "\n".join(lines) + "\n"


def printable(text: str) -> str:
    """``text`` without characters that steer a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def architectures(listed: str) -> str:
    """CMake's list of CUDA architectures, in words; ``listed`` is empty without kernels."""
    if not listed:
        return "none in this build"
    words = []
    for entry in listed.split():
        number, _, kind = entry.partition("-")
        machine_code = f"sm_{number}" if kind != "virtual" else ""
        intermediate = f"PTX {number}" if kind != "real" else ""
        words += [word for word in (machine_code, intermediate) if word]
    return ", ".join(words)


def _of_the_extension() -> list[tuple[str, Callable[[], list[str]]]]:
    from bagua import _C

    return [
        ("CPU loops", lambda: [f"instruction set {_C.instruction_set()}"]),
        ("codecs", lambda: [", ".join(_C.codec_names())]),
    ]


def _package() -> list[str]:
    return [
        f"{bagua.__version__}, built for torch {_build.TORCH_VERSION}",
        str(Path(_build.__file__).parent),
    ]


def _torch() -> list[str]:
    abi = int(torch.compiled_with_cxx11_abi())
    return [f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, C++11 ABI {abi}"]


def _packages() -> list[str]:
    found = []
    for name in _FRAMEWORKS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return [", ".join(found) or "none of those that bagua works with"]


def _processor() -> list[str]:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else []
    usable = len(os.sched_getaffinity(0))
    name = names[0] if names else platform.machine()
    return [f"{name}, {usable} usable processor(s), {torch.get_num_threads()} thread(s) of torch"]


def _gpus() -> list[str]:
    count = torch.cuda.device_count()
    if not count:
        return ["none"]
    found = (torch.cuda.get_device_properties(i) for i in range(count))
    return [f"{i}: {gpu.name} (sm_{gpu.major}{gpu.minor})" for i, gpu in enumerate(found)]


def _nccl() -> list[str]:
    from bagua import _C
    from bagua._core.group.connections import nccl_library

    if not _C.has_nccl:
        return ["not in this build"]
    try:
        library = nccl_library()
    except bagua.BaguaError as error:
        if not torch.cuda.device_count():
            return ["in this build; this machine has no GPU, and needs no libnccl"]
        lines = (line.strip() for line in str(error).splitlines())
        return ["in this build, but not on this machine:", *lines]
    return [f"{library.version}, {library.path}"]


def _network() -> list[str]:
    return [
        f"{one.name}: {', '.join(one.addresses) or 'no address'}"
        f"{'' if one.mtu is None else f', MTU {one.mtu}'}{'' if one.up else ', down'}"
        for one in interfaces()
    ]


def _gloo() -> list[str]:
    address, reason = gloo_address()
    return [f"{address or 'no address: no such interface, or none on it'} ({reason})"]


def _variables() -> list[str]:
    own = [name for name in sorted(os.environ) if name.startswith("BAGUA_")]
    others = [name for name in sorted(os.environ) if _OTHERS.fullmatch(name)]
    lines = [
        f"{name}={_shown(name)}{'' if name in VARIABLES else ' (not read by this version)'}"
        for name in own
    ]
    return (lines or ["no BAGUA_* variable is set"]) + [f"{n}={os.environ[n]}" for n in others]


def _shown(name: str) -> str:
    """The value of a variable, unless it is nobody's business."""
    return "(hidden)" if "SECRET" in name else os.environ[name]


# The network.


class Interface(NamedTuple):
    """A network interface; ``mtu`` is the largest packet in bytes, None: not told."""

    name: str
    up: bool
    addresses: list[str]
    mtu: int | None


def interfaces() -> list[Interface]:
    names = [name for _, name in socket.if_nameindex()]
    ipv6 = _ipv6_addresses()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return [_interface(asking, name, ipv6.get(name, [])) for name in names]


def gloo_address(variables: dict[str, str] | None = None) -> tuple[str | None, str]:
    """Address at which gloo listens in this process, and where it comes from.

    None where ``GLOO_SOCKET_IFNAME``, of ``variables`` or the environment, names no interface that
    has one.
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
