"""The checkpoints in a folder: names, completeness, and the newest that all ranks have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bagua import _C
from bagua._core.group.connections import Connections
from bagua._core.state import checkpoint_file as _checkpoint_file
from bagua._core.state.checkpoint_file import DamagedFile

__all__ = ["Chosen", "Saved", "choose", "complete", "file_of", "remove_before"]

_NAME = re.compile(r"\.?step-(\d+)\.rank-(\d+)-of-(\d+)\.pt(\.\d+\.part)?")
_SIZES = 2**20  # more than there are ranks


class Saved(NamedTuple):
    """A checkpoint: one file of each of ``size`` ranks. Ordered by step."""

    step: int
    size: int


class Chosen(NamedTuple):
    """The checkpoints that all ranks can load, and why newer ones are not loaded (file: reason)."""

    saved: Saved | None
    refused: dict[Path, str]


def file_of(folder: Path, saved: Saved, rank: int) -> Path:
    """Location of one rank's part of a checkpoint."""
    return folder / f"step-{saved.step:09d}.rank-{rank}-of-{saved.size}.pt"


def _found(folder: Path) -> Iterator[tuple[Path, Saved, int, bool]]:
    """(file, its checkpoint, its rank, whether it was abandoned in the middle of writing)."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            step, rank, size = (int(number) for number in match.group(1, 2, 3))
            yield path, Saved(step, size), rank, match.group(4) is not None


def _listed(folder: Path) -> dict[Saved, set[int]]:
    ranks: dict[Saved, set[int]] = {}
    for _, saved, rank, abandoned in _found(folder):
        if not abandoned:
            ranks.setdefault(saved, set()).add(rank)
    return ranks


def complete(folder: Path) -> list[Saved]:
    """The checkpoints of which every rank's file is there, oldest first."""
    listed = _listed(folder)
    return sorted(saved for saved, ranks in listed.items() if ranks >= set(range(saved.size)))


def remove_before(folder: Path, step: int) -> None:
    """Remove all files of earlier steps."""
    for path, saved, _, _ in list(_found(folder)):
        if saved.step < step:
            path.unlink(missing_ok=True)


class _Candidates:
    """The folder's checkpoints, as this rank sees them. A file is read when it is asked for."""

    def __init__(self, folder: Path, connections: Connections) -> None:
        self._folder = folder
        self._rank, self._size = connections.rank, connections.size
        self._listed = _listed(folder)
        self._known: dict[Path, int | DamagedFile] = {}
        self.refused: dict[Path, str] = {}
        self.damaged = False  # something is there that cannot be loaded

    def newest_before(self, bound: Saved | None) -> Saved | None:
        """The newest one before ``bound`` of which this rank can read what it needs."""
        for saved in sorted(self._listed, reverse=True):
            if (bound is None or saved < bound) and self.saving(saved) is not None:
                return saved
        return None

    def saving(self, saved: Saved) -> int | None:
        """The number of the saving that the files needed here have in common, if they are whole."""
        first: tuple[Path, int] | None = None
        # The parts of another number of ranks are all joined.
        needed = {0, self._rank} if saved.size == self._size else set(range(saved.size))
        for rank in sorted(needed):
            path = file_of(self._folder, saved, rank)
            known = self._look_at(path)
            if isinstance(known, DamagedFile):
                self.damaged |= path.exists()
                self.refused[path] = str(known)
                return None
            if first is not None and known != first[1]:
                self.refused[path] = f"it is of another saving of this step than {first[0].name}"
                return None
            first = first or (path, known)
        return None if first is None else first[1]

    def passed_over(self, chosen: Saved | None) -> dict[Path, str]:
        """Why checkpoints newer than ``chosen`` are not loaded, by file."""
        for saved in self._listed:
            if (chosen is None or saved > chosen) and self.saving(saved) is not None:
                path = file_of(self._folder, saved, min(self._rank, saved.size - 1))
                self.refused[path] = "whole, but another rank cannot load its part"
        return self.refused

    def _look_at(self, path: Path) -> int | DamagedFile:
        if path not in self._known:
            try:
                self._known[path] = _checkpoint_file.check(path)
            except DamagedFile as error:
                self._known[path] = error
        return self._known[path]


def choose(folder: Path, connections: Connections) -> Chosen:
    """The newest checkpoint that all ranks can load. All ranks call it.

    1. Every rank names its newest complete one; the oldest of these is the candidate, since some
       rank lacks the newer ones.
    2. If all ranks have the candidate, of the same save, it is chosen. Else older ones are tried.

    Raises:
        BaguaError: there are checkpoints, and none can be loaded because of damaged files.
    """
    candidates = _Candidates(folder, connections)
    bound: Saved | None = None
    while True:
        mine = candidates.newest_before(bound)
        code = -1 if mine is None else mine.step * _SIZES + mine.size
        (agreed,) = _minimum(connections, code)
        if agreed < 0:
            break
        bound = Saved(*divmod(agreed, _SIZES))
        saving = candidates.saving(bound)
        known, least, negative = _minimum(
            connections, int(saving is not None), saving or 0, -(saving or 0)
        )
        if known and least == -negative:
            return Chosen(bound, candidates.passed_over(bound))
    (undamaged,) = _minimum(connections, int(not candidates.damaged))
    if not undamaged:
        raise _C.BaguaError(
            f"{folder}: none of the checkpoints there can be loaded. Damaged on this rank: "
            f"{refused_text(candidates.refused) or 'nothing, see the others'}. Put back the "
            "files, or start anew in another folder."
        )
    return Chosen(None, candidates.passed_over(None))


def refused_text(refused: dict[Path, str]) -> str:
    """The list of refused files for messages."""
    return "; ".join(f"{path}: {reason}" for path, reason in refused.items())


def _minimum(connections: Connections, *numbers: int) -> list[int]:
    return connections.reduce_numbers("choosing a checkpoint", _C.ReduceOp.MIN, *numbers)
