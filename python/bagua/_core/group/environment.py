"""Settings of the launcher, read at every call from torch's group and the environment.

A variable with a value that it does not take raises ValueError.
"""

from __future__ import annotations

import math
import os
import re
import socket
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua._core.group.variables import integer

if TYPE_CHECKING:
    from bagua._core.group.launchers import Place

_TORCHRUN = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

#: Number of each rank's node and this rank, once there is a group that knows them.
_nodes: Callable[[], tuple[list[int], int] | None] | None = None


def set_nodes(nodes: Callable[[], tuple[list[int], int]] | None) -> None:
    """Let local numbers that no launcher tells come from ``nodes``, but in forked children."""
    global _nodes
    process = os.getpid()
    _nodes = nodes and (lambda: nodes() if os.getpid() == process else None)


def _place() -> Place | None:
    """The place that another launcher than torchrun gives this process, if it is the job's."""
    from bagua._core.group import launchers

    known = dist.is_initialized() or "RANK" in os.environ or "WORLD_SIZE" in os.environ
    try:
        found = launchers.place()
    except ValueError:
        if known:  # nobody asks for what the launcher does not tell
            return None
        raise
    if found is None or not known or found[2:4] == (get_rank(), get_world_size()):
        return found
    return None  # of the process that has started the ranks


def get_world_size() -> int:
    """Number of processes, of torch's group, else ``WORLD_SIZE`` or the launcher's, or 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return integer("WORLD_SIZE", 1)
    found = _place()
    return found.size if found else 1


def get_rank() -> int:
    """Rank of this process: in torch's default group, else ``RANK`` or the launcher's, or 0."""
    if dist.is_initialized():
        return dist.get_rank()
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return integer("RANK", 0)
    found = _place()
    return found.rank if found else 0


def get_local_rank() -> int:
    """Rank of this process on its node.

    ``LOCAL_RANK`` or another launcher's variable. Where ranks have none, such as those of
    ``torch.multiprocessing.spawn``, it is counted among the ranks of this host once bagua has its
    process group; before that it is the rank if torch's store is at a loopback address, else 0.

    Raises BaguaTimeoutError where it is counted, and a rank does not call
    ``bagua.init_process_group()`` within ten seconds.
    """
    if _is_of_job("LOCAL_RANK"):
        return integer("LOCAL_RANK", 0)
    found = _place()
    if found is not None and found.local_rank is not None:
        return found.local_rank
    here, rank = _ranks_of_host()
    return here.index(rank)


def get_local_size() -> int:
    """Number of processes on this node.

    ``LOCAL_WORLD_SIZE`` or another launcher's variable; else counted as ``get_local_rank()`` is.
    """
    if _is_of_job("LOCAL_WORLD_SIZE"):
        return integer("LOCAL_WORLD_SIZE", 1)
    found = _place()
    if found is not None and found.local_size is not None:
        return found.local_size
    return len(_ranks_of_host()[0])


def get_node_rank() -> int:
    """Number of this node.

    ``GROUP_RANK`` under torchrun, else ``NODE_RANK`` or another launcher's variable, else
    ``RANK // LOCAL_WORLD_SIZE`` where the latter is set, else the number of this host among those
    of bagua's process group, else 0.
    """
    told = _told_node()
    if told is not None:
        return told
    known = _nodes() if _nodes is not None else None
    if known is None:
        return 0
    numbers, rank = known
    return list(dict.fromkeys(numbers)).index(numbers[rank])


def get_node_number() -> int:
    """A number, below 2**31, that ranks of one node share: its rank, or one of this host."""
    told = _told_node()
    if told is not None:
        return told
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
    return zlib.crc32(host.encode()) >> 1


def _told_node() -> int | None:
    if all(_is_of_job(name) for name in _TORCHRUN):
        return integer("GROUP_RANK", 0)
    if _is_of_job("NODE_RANK"):
        return integer("NODE_RANK", 0)
    if _is_of_job("LOCAL_WORLD_SIZE"):
        return get_rank() // max(1, integer("LOCAL_WORLD_SIZE", 1))
    found = _place()
    return found.node if found else None


def _is_of_job(name: str) -> bool:
    """Whether a variable is set, and not that of a parent process with another rank."""
    if name not in os.environ or not dist.is_initialized():
        return name in os.environ
    job = dist.get_rank(), dist.get_world_size()
    return (integer("RANK", job[0]), integer("WORLD_SIZE", job[1])) == job


def _ranks_of_host() -> tuple[list[int], int]:
    """The ranks of this host as far as they are known, and this one."""
    known = _nodes() if _nodes is not None else None
    if known is not None:
        numbers, rank = known
        return [other for other, node in enumerate(numbers) if node == numbers[rank]], rank
    rank = get_rank()
    if dist.is_initialized() and is_loopback(store_address()[0]):
        return list(range(get_world_size())), rank
    return [rank], rank


def store_address() -> tuple[str, int]:
    """Host and port of the store of torch's group, else ``MASTER_ADDR`` and ``MASTER_PORT``.

    "" and 0 where neither has them.
    """
    store: Any = c10d._get_default_store() if dist.is_initialized() else None
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return str(store.host), int(store.port)
    return os.environ.get("MASTER_ADDR", ""), integer("MASTER_PORT", 0)


def is_loopback(host: str) -> bool:
    """Whether a host's name or address can only mean the machine that uses it."""
    return host == "localhost" or host == "::1" or re.fullmatch(r"127(\.\d+){3}", host) is not None


#: Time there and back from which on ranks are far from each other, in microseconds.
FAR_US = 5000


def congestion_controls() -> list[str]:
    """The kernel's algorithms for TCP, such as ``"cubic"``; the default comes first."""
    found: list[str] = []
    for name in ("tcp_congestion_control", "tcp_available_congestion_control"):
        with suppress(OSError):
            found += Path(f"/proc/sys/net/ipv4/{name}").read_text().split()
    return list(dict.fromkeys(found))


def congestion_control_of_far_ranks() -> str:
    """``BAGUA_CONGESTION_CONTROL``, or BBR where the kernel has it; empty: the kernel's default.

    BBR takes no lost packet for congestion, and keeps its rate while a connection idles. Cubic, the
    usual default, carries 5 Mb/s over 80 ms if one packet in a thousand is lost.
    """
    named = os.environ.get("BAGUA_CONGESTION_CONTROL", "")
    return named or ("bbr" if "bbr" in congestion_controls() else "")


def bucket_size_among(ranks: int, device: str = "cpu") -> int:
    """Bytes of a bucket by default: 10 MiB, on a GPU 32 MiB, and among many ranks 256 KiB for each.

    A part that a rank sends to another has 64 KiB then with 8 bits for 32. On a GPU a bucket costs
    the communication thread launches and calls of NCCL, whatever its size.
    """
    return max((10 if device == "cpu" else 32) * 1024**2, ranks * 256 * 1024)


def get_default_bucket_size(device: str = "cpu") -> int:
    """Bytes after which a bucket is closed: ``BAGUA_DEFAULT_BUCKET_SIZE``.

    Default: :func:`bucket_size_among` the ranks of the world, for a type of ``device``. Equal on
    all ranks, in elastic jobs too.
    """
    size = integer("BAGUA_DEFAULT_BUCKET_SIZE", bucket_size_among(get_world_size(), device))
    if size <= 0:
        raise ValueError(f"BAGUA_DEFAULT_BUCKET_SIZE={size} must be a positive number of bytes")
    return size


def get_check_weights_every() -> int | None:
    """Steps within which ranks compare all their weights, a part in each; 0: never, None: unset."""
    if "BAGUA_CHECK_WEIGHTS_EVERY" not in os.environ:
        return None
    every = integer("BAGUA_CHECK_WEIGHTS_EVERY", 0)
    if every < 0:
        raise ValueError(
            f"BAGUA_CHECK_WEIGHTS_EVERY={every} must be a number of steps, or 0 for no checks"
        )
    return every


def get_checksum() -> bool:
    """Whether compressed messages carry a checksum (``BAGUA_CHECKSUM``, "0" or "1", default 0)."""
    value = os.environ.get("BAGUA_CHECKSUM") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"BAGUA_CHECKSUM={value!r} must be 0 or 1")
    return value == "1"


def get_straggler_seconds() -> float:
    """Seconds of waiting before a warning (``BAGUA_STRAGGLER_SECONDS``, default 10); 0: none."""
    return _seconds("BAGUA_STRAGGLER_SECONDS", "10", "no warnings")


def get_top_seconds() -> float:
    """Seconds between publications for ``bagua top`` (``BAGUA_TOP``, default 0); 0: none."""
    return _seconds("BAGUA_TOP", "0", "no publication")


def _seconds(name: str, default: str, zero: str) -> float:
    text = os.environ.get(name, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 1e6:
        raise ValueError(f"{name}={text!r} must be a number of seconds, or 0 for {zero}")
    return seconds


def get_comm() -> str | None:
    """Transport (``BAGUA_COMM``).

    For CUDA tensors "nccl" of bagua's own, the default where the build has it, or "c10d", NCCL of
    torch.distributed; "gloo" for all tensors, those of CUDA through host memory. For CPU tensors
    "shm", memory that the ranks of a host share, or an error; "auto": such memory where all of a
    group can, else gloo. None is auto, but for exact sums of ``bagua.comm_hooks``, torch's on gloo.
    """
    comm = os.environ.get("BAGUA_COMM") or None
    if comm not in (None, "nccl", "c10d", "gloo", "shm", "auto"):
        raise ValueError(f"BAGUA_COMM={comm!r} must be nccl, c10d, gloo, shm or auto")
    return comm


def get_nccl_library() -> str | None:
    """Path of libnccl (``BAGUA_NCCL_LIBRARY``), or None: the one that torch uses."""
    return os.environ.get("BAGUA_NCCL_LIBRARY") or None


def get_master_addr() -> str:
    """Host of the store (``MASTER_ADDR``, default 127.0.0.1)."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def find_free_network_port() -> int:
    """A TCP port that was free a moment ago; another process may take it before you do."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def asked_for_autotuning() -> str:
    """What to say of variables for autotuning; empty: they are not set."""
    if os.environ.get("BAGUA_AUTOTUNE", "0") in ("", "0"):
        return ""
    given = sorted(name for name in os.environ if name.startswith("BAGUA_AUTOTUNE"))
    return (
        f"{', '.join(given)}: no effect, as there is no autotuning service. Algorithm.init('auto') "
        "measures the training as it begins and takes the fastest algorithm."
    )
