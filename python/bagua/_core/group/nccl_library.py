"""Finds the NCCL that torch uses: one copy per process."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch

from bagua import _C
from bagua._core.group import environment as env

__all__ = ["gpu_identity", "nccl_library", "nccl_paths"]

_NAME = "libnccl.so.2"


def gpu_identity(device: torch.device) -> str:
    """Identity of the GPU behind a CUDA device, in whatever process and order it is visible."""
    return str(torch.cuda.get_device_properties(device).uuid)


def nccl_paths() -> list[str]:
    """Paths of NCCL to try in a process that has not loaded it, the best one first.

    ``BAGUA_NCCL_LIBRARY`` alone where it is set. Else the wheel that torch's CUDA wheels depend on
    (``nvidia-nccl-cu12``, ``-cu13``), torch's own folder of libraries, and what the loader finds.
    """
    chosen = env.get_nccl_library()
    if chosen is not None:
        return [chosen]
    has_wheels = importlib.util.find_spec("nvidia") is not None
    wheel = importlib.util.find_spec("nvidia.nccl") if has_wheels else None
    roots = list(wheel.submodule_search_locations or []) if wheel else []
    files = [Path(root) / "lib" / _NAME for root in [*roots, str(Path(torch.__file__).parent)]]
    return [*(str(file) for file in files if file.exists()), _NAME]


@functools.cache
def nccl_library() -> _C.NcclLibrary:
    """The NCCL of this process: the one it has loaded already, else the first of ``nccl_paths()``.

    Raises:
        BaguaError: none could be loaded (the message lists the paths), it is too old, or this
            build has no NCCL.
    """
    return _C.NcclLibrary.find(nccl_paths())
