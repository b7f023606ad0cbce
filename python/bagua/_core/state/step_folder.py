"""Checkpoints on the disk: a folder per step that is complete or absent, with a part of each rank.

``step-<step>/rank-<rank>`` has the rank's tensors as torch.distributed.checkpoint writes them, and
``values.pt`` with everything else. ``step-<step>/digests`` has lengths and digests of all files,
since torch checks no bytes of tensors. The folder has a hidden name until all of it is written.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

#: A state as values by their paths: the keys from its root.
Leaves = dict[tuple[Any, ...], Any]

_STEP = re.compile(r"step-(\d+)")
_VALUES, _DIGESTS = "values.pt", "digests"
_PIECE = 2**22  # bytes that are read at once


class Damaged(Exception):
    """A file differs from the one that was written: its path, and how."""


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, the oldest first."""
    found = (_STEP.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def place_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}"


def hidden(place: Path, what: str = "part") -> Path:
    """The name of a step's folder until all of it is written."""
    return place.with_name(f".{place.name}.{what}")


def part_of(place: Path, rank: int) -> Path:
    return place / f"rank-{rank}"


def is_tensor(value: Any) -> bool:
    """Whether torch.distributed.checkpoint writes the value: a plain tensor."""
    return type(value) is torch.Tensor and value.layout == torch.strided


def write(part: Path, leaves: Leaves, **more: Any) -> list[str]:
    """Write ``leaves`` and ``more``, which :func:`read` returns; they are on the disk at return.

    Returns lines for :func:`publish`. Raises pickle.UnpicklingError where loading with
    ``weights_only=True`` would refuse them.
    """
    # Not at the top: it takes a second, which every program would pay.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    part.mkdir(parents=True)
    paths: dict[str, tuple[Any, ...]] = {}
    for path in [path for path, value in leaves.items() if is_tensor(value)]:
        name = ".".join(map(str, path))
        paths[repr(path) if name in paths else name] = path
    tensors = {name: leaves[path] for name, path in paths.items()}
    planner, writer = DefaultSavePlanner(), FileSystemWriter(part)
    plan, metadata = _planned(planner, tensors)
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plan)])
    written = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [written])
    content = {
        "leaves": [(path, value) for path, value in leaves.items() if not is_tensor(value)],
        "tensors": [
            (paths[name], name, tensor.dtype, tensor.shape, tensor.stride())
            for name, tensor in tensors.items()
        ],
        "places": {each.index.fqn: vars(each.storage_data) for each in written},
        "more": more,
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    _put(part / _VALUES, buffer.getbuffer())
    _load(part)
    _sync_folder(part)
    files = sorted(part.iterdir())
    return [f"{_digest(path)} {path.stat().st_size} {part.name}/{path.name}\n" for path in files]


def publish(place: Path, lines: Iterable[str]) -> None:
    """Give a step that all ranks have written its name; survives power cuts."""
    text = "".join(lines)
    _put(hidden(place) / _DIGESTS, (text + hashlib.blake2b(text.encode()).hexdigest()).encode())
    _sync_folder(hidden(place))
    if place.exists():
        os.replace(place, hidden(place, "old"))
    os.replace(hidden(place), place)
    clear(place.parent)
    _sync_folder(place.parent)


def remove(place: Path) -> None:
    """Remove a step: all of it, or nothing."""
    os.replace(place, hidden(place, "old"))
    clear(place.parent)


def clear(folder: Path) -> None:
    """Remove what killed processes have left of writing and removing."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def check(place: Path, rank: int, size: int) -> int:
    """Read what ``rank`` of ``size`` answers for: its part, and with another number of ranks all.

    Returns how many ranks saved the step; Damaged names a file that is missing, truncated or
    changed.
    """
    path = place / _DIGESTS
    try:
        text, _, last = path.read_text(errors="replace").rpartition("\n")
        if hashlib.blake2b(f"{text}\n".encode()).hexdigest() != last:
            raise Damaged(path, f"truncated or corrupted: it has {path.stat().st_size} bytes")
        files = [line.split(" ") for line in text.splitlines()]
        saved = len({Path(name).parent for _, _, name in files})
        needed = {rank} if saved == size else set(range(saved))
        parts = {part_of(place, needs) for needs in needed}
        for digest, length, name in files:
            path = place / name
            if path.parent in parts:
                _check_file(path, digest, int(length))
    except OSError as error:
        raise Damaged(path, f"it cannot be read ({error})") from error
    return saved


def _check_file(path: Path, digest: str, length: int) -> None:
    found = path.stat().st_size
    if found < length:
        raise Damaged(path, f"truncated: it has {found} bytes, and was written with {length}")
    if found > length or _digest(path) != digest:
        raise Damaged(path, "corrupted: its bytes are not those that were written")


def read(part: Path) -> tuple[Leaves, dict[str, Any]]:
    """Returns the values given to :func:`write`, on the CPU; :func:`check` has passed its parts."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

    content = _load(part)
    tensors = {
        name: torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        for _, name, dtype, shape, stride in content["tensors"]
    }
    plan, metadata = _planned(DefaultSavePlanner(), tensors)
    places = content["places"]
    metadata.storage_data = {
        item.index: _StorageInfo(**places[item.index.fqn]) for item in plan.items
    }
    planner, reader = DefaultLoadPlanner(), FileSystemReader(part)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    leaves = {path: tensors[name] for path, name, *_ in content["tensors"]}
    return dict(content["leaves"]) | leaves, content["more"]


def _planned(planner: SavePlanner, tensors: dict[str, torch.Tensor]) -> tuple[SavePlan, Metadata]:
    planner.set_up_planner(tensors, is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    return planner.finish_plan(plan), metadata


def _load(part: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(part / _VALUES, map_location="cpu", weights_only=True)
    return content


def _digest(path: Path) -> str:
    digest = hashlib.blake2b()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _put(path: Path, data: bytes | memoryview) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
