"""Residuals and factors of communication hooks in the folder of a library's checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bagua.comm_hooks import Handle

__all__ = ["load_hooks", "save_hooks"]


def _file(folder: str | PathLike[str], rank: int) -> Path:
    return Path(folder) / f"bagua_{rank}.pt"


def save_hooks(handles: Sequence[Handle], folder: str | PathLike[str]) -> None:
    """Write this rank's state into ``folder``. Every rank calls it, between two steps.

    Nothing is written for algorithms that remember nothing.
    """
    states = [handle.state_dict() for handle in handles]
    if not any(states):
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = {"size": dist.get_world_size(), "hooks": states}
    torch.save(state, _file(folder, dist.get_rank()))


def load_hooks(handles: Sequence[Handle], folder: str | PathLike[str]) -> None:
    """Load what :func:`save_hooks` has written. Every rank calls it, before the first step.

    With another number of ranks every rank gets the mean of the residuals, and reads all files.

    Raises:
        ValueError: the state is of another algorithm or model, of another number of models, or
            files of ranks are missing; names what does not fit.
    """
    remembering = [handle for handle in handles if handle.state_dict()]
    present = sorted(Path(folder).glob("bagua_*.pt"))
    if not present:
        if remembering:
            warnings.warn(
                f"{folder} has no state of bagua's hooks: residuals begin at zero, with the "
                "weights of the checkpoint",
                stacklevel=3,
            )
        return
    for handle, state in zip(handles, _states(folder, present, len(handles)), strict=True):
        handle.load_state_dict(state)


def _states(
    folder: str | PathLike[str], present: Sequence[Path], hooks: int
) -> list[dict[str, Any]]:
    """The state of each hook: this rank's own or, of another number of ranks, that of all."""
    own = _file(folder, dist.get_rank())
    content = torch.load(own if own in present else present[0], weights_only=True)
    size = content["size"]
    parts = [content]
    if size != dist.get_world_size() or own not in present:
        missing = [rank for rank in range(size) if not _file(folder, rank).exists()]
        if missing:
            raise ValueError(
                f"{folder} has no bagua_<rank>.pt of ranks {missing} of {size}, and this job has "
                f"{dist.get_world_size()} ranks: copy the files of all ranks there"
            )
        parts = [torch.load(_file(folder, rank), weights_only=True) for rank in range(size)]
    found = {len(part["hooks"]) for part in parts}
    if found != {hooks}:
        raise ValueError(
            f"{folder} has the states of {sorted(found)} models, and {hooks} are prepared here"
        )
    merged: list[dict[str, Any]] = [{} for _ in range(hooks)]
    for part in parts:
        for state, addition in zip(merged, part["hooks"], strict=True):
            state.update(addition)
    return merged
