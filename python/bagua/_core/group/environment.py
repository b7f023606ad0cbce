"""Settings of the launcher, read from the environment at every call.

A variable with a value that it does not take raises ValueError.
"""

import math
import os
import socket
import warnings

_TORCHRUN = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _integer(name: str, default: int) -> int:
    value = os.environ.get(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"environment variable {name}={value!r} is not an integer") from None


def get_world_size() -> int:
    """Number of processes (``WORLD_SIZE``, default 1)."""
    return _integer("WORLD_SIZE", 1)


def get_rank() -> int:
    """Rank of this process among all (``RANK``, default 0)."""
    return _integer("RANK", 0)


def get_local_rank() -> int:
    """Rank of this process on its node (``LOCAL_RANK``, default 0)."""
    return _integer("LOCAL_RANK", 0)


def get_local_size() -> int:
    """Number of processes on this node (``LOCAL_WORLD_SIZE``, default 1)."""
    return _integer("LOCAL_WORLD_SIZE", 1)


def get_node_rank() -> int:
    """Number of this node.

    ``GROUP_RANK`` under torchrun, else ``NODE_RANK``, else ``RANK // LOCAL_WORLD_SIZE`` where the
    latter is set, else 0.
    """
    if all(name in os.environ for name in _TORCHRUN):
        return _integer("GROUP_RANK", 0)
    if "NODE_RANK" in os.environ:
        return _integer("NODE_RANK", 0)
    if "LOCAL_WORLD_SIZE" in os.environ:
        return get_rank() // max(1, get_local_size())
    return 0


def get_default_bucket_size() -> int:
    """Bytes after which a bucket is closed (``BAGUA_DEFAULT_BUCKET_SIZE``, default 10 MiB)."""
    size = _integer("BAGUA_DEFAULT_BUCKET_SIZE", 10 * 1024**2)
    if size <= 0:
        raise ValueError(f"BAGUA_DEFAULT_BUCKET_SIZE={size} must be a positive number of bytes")
    return size


def get_check_weights_every() -> int | None:
    """Steps within which ranks compare all their weights, a part in each; 0: never, None: unset."""
    if "BAGUA_CHECK_WEIGHTS_EVERY" not in os.environ:
        return None
    every = _integer("BAGUA_CHECK_WEIGHTS_EVERY", 0)
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


def warn_of_autotuning() -> None:
    if os.environ.get("BAGUA_AUTOTUNE", "0") in ("", "0") or get_rank() != 0:
        return
    given = sorted(name for name in os.environ if name.startswith("BAGUA_AUTOTUNE"))
    warnings.warn(
        f"{', '.join(given)}: no effect, as there is no autotuning service. Algorithm.init('auto') "
        "measures the training as it begins and takes the fastest algorithm.",
        stacklevel=3,
    )
