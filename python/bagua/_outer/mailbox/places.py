"""The place of a URL: a folder, a server of SFTP, or what fsspec reaches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from bagua._outer.mailbox.store import Folder, Remote, public

if TYPE_CHECKING:
    from bagua._outer.mailbox.sftp import Sftp

Place: TypeAlias = "Folder | Remote | Sftp"


def place_at(url: str, owner: str, *, writes: bool = True) -> Place:
    """The place at a URL. ``owner``: of temporary files. Makes the folder, where it ``writes``.

    ValueError: it cannot create a file exclusively. ImportError: fsspec, or its implementation for
    this protocol, is not installed. OSError: it cannot be reached or written.
    """
    folder = _folder_at(url)
    if folder is not None:
        return Folder(folder, owner, writes)
    if url.partition("://")[0] in ("sftp", "ssh"):
        from bagua._outer.mailbox.sftp import Sftp

        return Sftp(url, owner, writes)
    return Remote(url, writes)


def pause_at(url: str) -> tuple[float, float]:
    """The pauses of the place at a URL, which need not be reached for that."""
    return Remote.pause if _folder_at(url) is None else Folder.pause


def shown(url: str) -> str:
    """A URL for messages: that of its place."""
    return str(_folder_at(url) or public(url))


def _folder_at(url: str) -> Path | None:
    protocol, separator, path = url.partition("://")
    if separator and protocol != "file":
        return None
    return Path(path if separator else url).absolute()
