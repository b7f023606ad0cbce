"""Bytes by key, in a file that the processes of a machine share: SQLite."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

__all__ = ["SqliteStore"]

_SECONDS_LOCKED = 30.0  # that a process waits for others' writes
_TABLE = "CREATE TABLE IF NOT EXISTS cache (key TEXT PRIMARY KEY, value BLOB NOT NULL)"

# Connections of a process before its fork, which SQLite forbids the child to close.
_inherited: list[sqlite3.Connection] = []


class SqliteStore(MutableMapping[str, bytes]):
    """A mapping in an SQLite file; any number of processes and threads of one machine may use it.

    Each thread, and each forked process, such as a ``DataLoader``'s worker, opens the file itself.

    Args:
        path: of the file, on a local disk: SQLite's locks do not work on many network file systems.
            None: a temporary one, which this process deletes when the store goes.

    Raises:
        sqlite3.Error: the file cannot be made, or is none of SQLite's.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._folder = None
        if path is None:
            self._folder = tempfile.TemporaryDirectory(prefix="bagua-cache-")
            path = Path(self._folder.name) / "cache.sqlite3"
        self.path = Path(path)
        self._own = threading.local()
        with self._connection() as connection:
            connection.execute(_TABLE)

    def _connection(self) -> sqlite3.Connection:
        process, connection = getattr(self._own, "opened", (0, None))
        if connection is not None and process != os.getpid():
            _inherited.append(connection)
            connection = None
        if connection is None:
            import sqlite3  # some builds of Python have none, and others do not use it

            connection = sqlite3.connect(self.path, timeout=_SECONDS_LOCKED)
            # Readers go on beside a writer; a crash of the machine may lose the last writes only.
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            self._own.opened = (os.getpid(), connection)
        return connection

    def __getitem__(self, key: str) -> bytes:
        query = "SELECT value FROM cache WHERE key = ?"
        row = self._connection().execute(query, (key,)).fetchone()
        if row is None:
            raise KeyError(key)
        value: bytes = row[0]
        return value

    def __setitem__(self, key: str, value: bytes) -> None:
        self.write({key: value})

    def write(self, entries: Mapping[str, bytes]) -> None:
        """Set several entries at once."""
        with self._connection() as connection:
            connection.executemany("INSERT OR REPLACE INTO cache VALUES (?, ?)", entries.items())

    def __delitem__(self, key: str) -> None:
        with self._connection() as connection:
            if connection.execute("DELETE FROM cache WHERE key = ?", (key,)).rowcount == 0:
                raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        rows = self._connection().execute("SELECT key FROM cache ORDER BY key").fetchall()
        return iter([key for (key,) in rows])

    def __len__(self) -> int:
        (count,) = self._connection().execute("SELECT COUNT(*) FROM cache").fetchone()
        return int(count)

    def __getstate__(self) -> dict[str, object]:
        if self._folder is not None:
            raise TypeError("a temporary cache cannot be pickled: give it a path")
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]
