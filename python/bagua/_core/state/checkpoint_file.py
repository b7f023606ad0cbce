"""Files that are complete or absent, and whose changed bytes are detected.

A file is what ``torch.save`` writes, readable by ``torch.load(weights_only=True)``, and a trailer
of 56 bytes: the magic, the number of the saving (u64), the length of the preceding bytes (u64), and
blake2b of all of that and both numbers (32 bytes), little-endian. torch itself checks no bytes of
tensors.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

__all__ = ["DamagedFile", "check", "read", "remove_abandoned", "write"]

_MAGIC = b"baguack1"
_NUMBERS = struct.Struct("<QQ")
_DIGEST_BYTES = 32
_TRAILER_BYTES = len(_MAGIC) + _NUMBERS.size + _DIGEST_BYTES
_PIECE = 2**22  # bytes that are read at once


class DamagedFile(Exception):
    """A file differs from the one that was written; the message says how."""


class _Hashing:
    """A file opened for writing that tracks the digest and length of its contents."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self.length = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.digest.update(view)
        self.length += view.nbytes
        self._file.write(view)
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()


def write(path: Path, content: Any, saving: int) -> None:
    """Put ``content`` at ``path``: all of it, power cuts survived, or nothing has changed.

    1. Write a temporary file in the same folder, and fsync it.
    2. Read it back as loading will, without the tensors' elements.
    3. Rename it, and fsync the folder.

    Raises:
        OSError, RuntimeError: it could not be written; nothing is left behind.
        pickle.UnpicklingError: loading with ``weights_only=True`` would refuse it.
    """
    remove_abandoned(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            hashing = _Hashing(file)
            torch.save(content, hashing)  # type: ignore[arg-type]
            numbers = _NUMBERS.pack(saving, hashing.length)
            hashing.digest.update(numbers)
            file.write(_MAGIC + numbers + hashing.digest.digest())
            file.flush()
            os.fsync(file.fileno())
        torch.load(part, map_location="cpu", weights_only=True, mmap=True)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def remove_abandoned(path: Path) -> None:
    """Remove what killed processes have left of writing ``path``."""
    for abandoned in path.parent.glob(f".{path.name}.*.part"):
        abandoned.unlink(missing_ok=True)


def check(path: Path) -> int:
    """The number of the saving, after reading every byte.

    Raises:
        DamagedFile: it is missing, truncated or changed.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _check(file, size)
    except OSError as error:
        raise DamagedFile(f"it cannot be read ({error})") from error


def _check(file: IO[bytes], size: int) -> int:
    if size < _TRAILER_BYTES:
        raise DamagedFile(f"truncated: it has {size} bytes")
    file.seek(size - _TRAILER_BYTES)
    trailer = file.read(_TRAILER_BYTES)
    if not trailer.startswith(_MAGIC):
        raise DamagedFile(f"truncated: its {size} bytes do not end with what every file ends with")
    numbers = trailer[len(_MAGIC) : -_DIGEST_BYTES]
    saving, length = _NUMBERS.unpack(numbers)
    if length != size - _TRAILER_BYTES:
        raise DamagedFile(f"it has {size} bytes, and was written with {length + _TRAILER_BYTES}")
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    file.seek(0)
    for piece in _pieces(file, length):
        digest.update(piece)
    digest.update(numbers)
    if digest.digest() != trailer[-_DIGEST_BYTES:]:
        raise DamagedFile("corrupted: its bytes are not those that were written")
    return int(saving)


def _pieces(file: IO[bytes], length: int) -> Iterator[bytes]:
    while length > 0:
        piece = file.read(min(_PIECE, length))
        if not piece:
            raise DamagedFile("truncated while it was read")
        length -= len(piece)
        yield piece


def read(path: Path) -> Any:
    """The state given to :func:`write`, on the CPU. For files that :func:`check` has passed."""
    return torch.load(path, map_location="cpu", weights_only=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
