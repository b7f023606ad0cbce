"""Warnings of the package: at the user's line, once per job."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import warnings
from contextlib import suppress
from types import FrameType

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua._core.group import environment as env

_OWN = {"bagua", "mlbench_core"}
# Modules between the user's code and the package.
_NOT_THE_USERS = sys.stdlib_module_names | {
    *("torch", "lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers"),
}
#: Texts about which the ranks decide in the store who says them; of others each rank speaks.
_MOST_TEXTS = 64

_store: c10d.Store | None = None
_process = 0  # whose connection to the store it is: a forked child has the same socket
_said_here: dict[str, bool] = {}


def speak_through(store: c10d.Store | None) -> None:
    """Let ranks find out through the group's ``store`` who says what they all have to say."""
    global _store, _process
    _store, _process = store, os.getpid()
    _said_here.clear()


def warn(text: str, category: type[Warning] = UserWarning, *, each_rank: bool = False) -> None:
    """Warn at the line of the user's code that has led here.

    Of several ranks with one text the first one says it; before there is a group rank 0 does.
    ``each_rank``: this rank speaks, whatever others do, and the store is not asked.
    """
    if not (each_rank or _speaks(text)):
        return
    frame = _frame_of_user() or sys._getframe(1)
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def warn_here(text: str) -> None:
    """Warn of what is not a reason to end a step, not even where warnings are errors."""
    with suppress(Warning):
        warn(text, RuntimeWarning, each_rank=True)


def _speaks(text: str) -> bool:
    if _store is None or not dist.is_initialized():
        return env.get_rank() == 0
    if dist.get_world_size() == 1 or os.getpid() != _process:
        return True
    if text not in _said_here and len(_said_here) < _MOST_TEXTS:
        own = str(dist.get_rank())
        key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        try:
            first = _store.compare_set(f"said/{key}", "", own)
        except RuntimeError:  # the process with the store may be gone
            first = own.encode()
        _said_here[text] = first == own.encode()
    return _said_here.get(text, True)


def _frame_of_user() -> FrameType | None:
    """The user's frame that led here in this thread or, where there is none, in the main thread."""
    main = None  # in the main thread that is this frame, which would keep itself and its callers
    if threading.current_thread() is not threading.main_thread():
        main = sys._current_frames().get(threading.main_thread().ident or 0)
    for frame in (sys._getframe(2), main):
        names, frames = [], []
        while frame is not None:
            names.append(frame.f_globals.get("__name__", "").partition(".")[0])
            frames.append(frame)
            frame = frame.f_back
        # Modules that the package imports are inside of its frames, and may be anyone's.
        inside = max((i for i, name in enumerate(names) if name in _OWN), default=-1)
        for name, found in list(zip(names, frames, strict=True))[inside + 1 :]:
            if name not in _NOT_THE_USERS:
                return found
    return None
