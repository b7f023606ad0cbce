"""Checkpoints on the disk: a folder per step that is complete or absent, with a part of each rank.

``step-<step>/rank-<rank>`` has the rank's tensors as torch.distributed.checkpoint writes them, and
``values.pt`` with everything else. ``step-<step>/digests`` has lengths and digests of all files,
since torch checks no bytes of tensors. The folder has a hidden name until all of it is written.

Note [Files of others]
Anyone may have written a checkpoint, with right digests too. Reading it opens regular files of the
step's folder only, follows no link, allocates no more than the files' sizes, and either returns
values or raises Damaged, which names the file. Folders above the step's are the user's.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from bagua._core.state.entries import (
    UnknownNameError,
    allowed_by_user,
    beyond_archives,
    described,
    undescribed,
)
from bagua._core.state.saved_values import short_text

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

#: A state as values by their paths: the keys from its root.
Leaves = dict[tuple[Any, ...], Any]
#: Returns the classes and functions that values may be of, by name: :func:`entries.held`.
Names = Callable[[], Mapping[str, Any]]

_STEP = re.compile(r"step-(\d{1,18})", re.ASCII)
_NAME = r"[\w.-]{0,200}\w"  # of a file; it is in its folder
_LINE = re.compile(rf"([0-9a-f]{{128}}) (\d{{1,18}}) (rank-(\d{{1,9}}))/({_NAME})", re.ASCII)
_VALUES, _DIGESTS, _OWNER = "values.pt", "digests", "owner"
_MOST_DIGESTS = 2**26  # bytes of the file; three lines a rank
_PIECE = 2**22  # bytes that are read at once


class Damaged(Exception):
    """A file differs from the one that was written: its path, and how."""

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


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


def write(part: Path, leaves: Leaves, names: Names = allowed_by_user, **more: Any) -> list[str]:
    """Write ``leaves`` and ``more``, which :func:`read` returns; they are on the disk at return.

    Returns lines for :func:`publish`. Raises TypeError where reading them would be refused: they
    are not plain data, nor of ``names``.
    """
    # Not at the top: it takes a second, which every program would pay.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    part.mkdir(parents=True)
    paths: dict[str, tuple[Any, ...]] = {}
    for path in [path for path, value in leaves.items() if is_tensor(value)]:
        name = ".".join(map(str, path))
        paths[repr(path) if name in paths else name] = path
    tensors = {name: _dense(leaves[path]) for name, path in paths.items()}
    planner, writer = DefaultSavePlanner(), FileSystemWriter(part)
    plan, metadata = _planned(planner, tensors)
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plan)])
    written = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [written])
    others = {path: value for path, value in leaves.items() if not is_tensor(value)}
    trusted = allowed_by_user()
    beyond = {path: v for path, v in others.items() if beyond_archives(v, trusted)}
    content = {
        "leaves": [(path, value) for path, value in others.items() if path not in beyond],
        "entries": [(path, *described(v, _shown(path))) for path, v in beyond.items()],
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
    _read_back(part, names)
    _sync_folder(part)
    files = sorted(part.iterdir())
    return [f"{_digest(path)} {path.stat().st_size} {part.name}/{path.name}\n" for path in files]


def _read_back(part: Path, names: Names) -> None:
    try:
        _described_of(part, _content_of(part), names)
    except (Damaged, UnknownNameError) as error:
        raise TypeError(f"the state has values that cannot be loaded: {error.args[-1]}") from error


def begin(place: Path, owner: str) -> None:
    """Make the hidden folder of a step, and write there by which call."""
    clear(place.parent)
    hidden(place).mkdir(parents=True)
    _put(hidden(place) / _OWNER, owner.encode())


def is_begun(place: Path, owner: str) -> bool:
    """Whether the hidden folder that this process sees is that of :func:`begin`."""
    try:
        os.listdir(place.parent)  # NFS forgets which names it has not found
        return (hidden(place) / _OWNER).read_bytes() == owner.encode()
    except OSError:
        return False


def publish(place: Path, lines: Iterable[str]) -> None:
    """Give a step that all ranks have written its name; survives power cuts.

    ``lines`` are those of all ranks. Damaged: a file of theirs is not there.
    """
    text = "".join(lines)
    _look_for(hidden(place), text)
    _put(hidden(place) / _DIGESTS, (text + _sum(text)).encode())
    (hidden(place) / _OWNER).unlink(missing_ok=True)
    _sync_folder(hidden(place))
    if place.exists():
        os.replace(place, hidden(place, "old"))
    os.replace(hidden(place), place)
    clear(place.parent)
    _sync_folder(place.parent)


def confirm(place: Path, lines: Iterable[str]) -> None:
    """Raise Damaged unless this process sees a published step with the files of ``lines``."""
    text = "".join(lines)
    os.listdir(place.parent)
    if text not in _digests_of(place):
        raise Damaged(place / _DIGESTS, "it is not the file that was written")
    _look_for(place, text)


def _look_for(folder: Path, text: str) -> None:
    for line in text.splitlines():
        _, length, name = line.split(" ")
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise Damaged(folder / name, f"it is gone ({error.strerror})") from error
        if found != int(length):
            raise Damaged(folder / name, f"it has {found} bytes, and was written with {length}")


def fingerprints(folder: Path) -> dict[int, str]:
    """By the steps of a folder: text that differs where their files do."""
    found = {}
    for step in steps(folder):
        with suppress(Damaged):
            found[step] = _sum(_digests_of(place_of(folder, step)))
    return found


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
    lines = [_LINE.fullmatch(line) for line in _digests_of(place).split("\n")[:-1]]
    files = {(int(each[4]), each[5]): (each[1], int(each[2])) for each in lines if each}
    saved = len({part for part, _ in files})
    if len(files) != len(lines) or any((part, _VALUES) not in files for part in range(saved)):
        raise Damaged(place / _DIGESTS, "corrupted: it is not a list of the files of all ranks")
    for (part, name), (digest, length) in files.items():
        if saved != size or part == rank:
            _check_file(part_of(place, part) / name, digest, length)
    return saved


def _digests_of(place: Path) -> str:
    """The lines of the file of digests."""
    path = place / _DIGESTS
    with _opened(path) as file:
        data = file.read(_MOST_DIGESTS + 1)
    text, _, last = data.decode(errors="replace").rpartition("\n")
    if len(data) > _MOST_DIGESTS or _sum(f"{text}\n") != last:
        raise Damaged(path, f"truncated or corrupted: it has {len(data)} bytes")
    return f"{text}\n"


def _sum(text: str) -> str:
    return hashlib.blake2b(text.encode()).hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file of a step, open for reading; what goes wrong with it is Damaged."""
    try:
        for each in (path, path.parent, path.parent.parent)[: 2 if path.name == _DIGESTS else 3]:
            if each.is_symlink():
                raise Damaged(each, "it is a link, which may lead out of the checkpoint")
        if not stat.S_ISREG(path.stat().st_mode):
            raise Damaged(path, "it is not a regular file")
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags), "rb") as file:
            yield file
    except OSError as error:
        raise Damaged(path, f"it cannot be read ({error})") from error


def _check_file(path: Path, digest: str, length: int) -> None:
    with _opened(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found < length:
            raise Damaged(path, f"truncated: it has {found} bytes, and was written with {length}")
        if found > length or _digest_of(file, length) != digest:
            raise Damaged(path, "corrupted: its bytes are not those that were written")


def read(part: Path, names: Names = allowed_by_user) -> tuple[Leaves, dict[str, Any]]:
    """Returns the values given to :func:`write`, on the CPU; :func:`check` has passed its parts.

    Raises Damaged, whatever the files hold: Note [Files of others]. UnknownNameError: a value is of
    a class that is not among ``names``.
    """
    content = _content_of(part)
    leaves: Leaves = dict(content["leaves"]) | _described_of(part, content, names)
    with refusing(part / _VALUES):
        for path, name, *described in content["tensors"]:
            leaves[path] = _tensor_of(part, content["places"][name], *described)
    return leaves, content["more"]


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """What cannot be understood is Damaged; its text is cut, and printable."""
    try:
        yield
    except (Damaged, UnknownNameError):
        raise
    except Exception as error:
        raise Damaged(path, f"it cannot be understood ({short_text(error)})") from error


def _described_of(part: Path, content: Mapping[str, Any], names: Names) -> Leaves:
    """The values that an archive has as entries."""
    with refusing(part / _VALUES):
        return {
            path: undescribed(entry, tensors, _shown(path), names)
            for path, entry, tensors in content["entries"]
        }


def _shown(path: tuple[Any, ...]) -> str:
    return f"'{'/'.join(map(str, path))[:200]}'"


def _content_of(part: Path) -> dict[str, Any]:
    """``values.pt`` of a part: entries of the types that :func:`write` gives them."""
    from bagua._core.state.archive import load_archive

    path = part / _VALUES
    with refusing(path):
        with _opened(path) as file:
            data = file.read(os.fstat(file.fileno()).st_size)
        content = load_archive(data)
        if isinstance(content, dict):
            content.setdefault("entries", [])  # which older files do not have
        kinds = {"leaves": list, "entries": list, "tensors": list, "places": dict, "more": dict}
        if not isinstance(content, dict) or {k: type(content.get(k)) for k in kinds} != kinds:
            raise ValueError(f"it has no {', '.join(kinds)}")
        named = (content[each] for each in ("leaves", "entries", "tensors"))
        paths = [entry[0] for entry in chain(*named)]
        inner = {path[:end] for path in paths for end in range(len(path))}
        if any(type(path) is not tuple or not path or path in inner for path in paths):
            raise ValueError("two values have one place")
        if len(set(paths)) != len(paths) or any(len(entry) != 2 for entry in content["leaves"]):
            raise ValueError("two values have one name")
    return dict(content)


def _tensor_of(
    part: Path, place: Mapping[str, Any], dtype: Any, shape: Any, stride: Any
) -> torch.Tensor:
    """A tensor of the description, out of the archive that :mod:`torch.distributed` has written."""
    from bagua._core.state.archive import read_records

    name, offset, length = (place[key] for key in ("relative_path", "offset", "length"))
    if not re.fullmatch(_NAME, name, re.ASCII) or place.get("transform_descriptors"):
        raise ValueError(f"it is written in another way, or in another folder: {name}")
    if any(type(number) is not int or number < 0 for number in (*shape, *stride, offset, length)):
        raise ValueError(f"its shape, strides or place in {name} are not numbers")
    with _opened(part / name) as file:
        if offset + length > os.fstat(file.fileno()).st_size:
            raise Damaged(part / name, f"truncated: a tensor of it ends at {offset + length}")
        file.seek(offset)
        data = bytearray(read_records(file.read(length))["data/0"])
    elements = math.prod(shape)
    if len(shape) != len(stride) or elements * dtype.itemsize != len(data):
        raise ValueError(f"a tensor of {tuple(shape)} {dtype} has {len(data)} bytes in {name}")
    if not data:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).as_strided(tuple(shape), tuple(stride))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory without gaps, which :func:`_tensor_of` takes back."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone()


def _planned(planner: SavePlanner, tensors: dict[str, torch.Tensor]) -> tuple[SavePlan, Metadata]:
    planner.set_up_planner(tensors, is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    return planner.finish_plan(plan), metadata


def _digest_of(file: BinaryIO, length: int) -> str:
    digest, left = hashlib.blake2b(), length
    while left > 0 and (piece := file.read(min(left, _PIECE))):
        digest.update(piece)
        left -= len(piece)
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return _digest_of(file, path.stat().st_size)


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
