"""``bagua report``: versions, processors, network and settings of this machine."""

from __future__ import annotations

import os
import platform
import re
import textwrap
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import bagua
from bagua import _build
from bagua._tools.interfaces import gloo_address, interfaces

__all__ = ["VARIABLES", "architectures", "printable", "report_text"]

#: The variables that bagua reads.
VARIABLES = (
    "BAGUA_AUTOTUNE",
    "BAGUA_CHECKSUM",
    "BAGUA_CHECK_WEIGHTS_EVERY",
    "BAGUA_COMM",
    "BAGUA_DEFAULT_BUCKET_SIZE",
    "BAGUA_LANES",
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


def report_text(error: ImportError | None = None) -> str:
    """The report, in lines of at most 80 columns.

    ``error``: the reason for which the extension cannot be imported; without its entries then.
    """
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
        *([("does not work", lambda: [str(error)])] if error is not None else []),
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
    from bagua._core.group.nccl_library import nccl_library

    if not _C.has_nccl:
        return ["not in this build"]
    try:
        library = nccl_library()
    except bagua.BaguaError as error:
        return [f"in this build, but not on this machine: {error}"]
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
        f"{name}={os.environ[name]}{'' if name in VARIABLES else ' (not read by this version)'}"
        for name in own
    ]
    return (lines or ["no BAGUA_* variable is set"]) + [f"{n}={os.environ[n]}" for n in others]
