"""``CacheLoader``: values that are slow to make, kept between epochs."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from bagua.torch_api.contrib.cache_store import SqliteStore

__all__ = ["CacheLoader"]


class CacheLoader:
    """Returns values by key, from a cache, or made and put into it.

    Values are written as by ``torch.save`` and read as by ``torch.load(weights_only=True)``:
    tensors, numbers, text, and lists, tuples and dicts of them, and classes that
    ``torch.serialization.add_safe_globals`` was told. Bagua pickled them.

    Args:
        backend: ``"sqlite"``, a file of SQLite that the processes of a machine share (``path=``,
            default a temporary one of this process); or your own mapping of text to bytes, such as
            a client of a key-value server. Bagua's ``"redis"`` is refused: it started a server.
        dataset_name: distinguishes datasets in one store.
        writer_buffer_size: so many new values are written at once; until then they are served from
            memory. ``flush()`` writes them.
        path: of the file, for ``"sqlite"``; kept after the end. Remove it when the values change.

    Raises:
        ValueError: an unknown backend, or a size below 1.
        sqlite3.Error: the file cannot be made or is none of SQLite's.
    """

    def __init__(
        self,
        backend: str | MutableMapping[str, bytes] = "sqlite",
        dataset_name: str = "",
        writer_buffer_size: int = 1,
        **kwargs: Any,
    ) -> None:
        if isinstance(backend, str):
            if backend != "sqlite":
                raise ValueError(
                    f"no cache backend '{backend}': use 'sqlite', or pass a mapping of text to "
                    "bytes, which may be the client of a server of your own"
                )
            backend = SqliteStore(**kwargs)
        elif kwargs:
            raise ValueError(f"{', '.join(kwargs)}: arguments are for the backend 'sqlite' only")
        if writer_buffer_size < 1:
            raise ValueError(f"writer_buffer_size={writer_buffer_size} must be at least 1")
        self.store = backend
        self._prefix = f"{dataset_name}_"
        self._most = writer_buffer_size
        self._pending: dict[str, bytes] = {}
        self._works = True

    def get(self, key: str | int, load_fn: Callable[[Any], Any]) -> Any:
        """The cached value of ``key``, else ``load_fn(key)``, which is then cached.

        A store that fails is named in a warning, once, and no longer used.

        Raises:
            TypeError: the value is of a class that is not safe to load, named with the remedy.
        """
        name = f"{self._prefix}{key}"
        data = self._pending.get(name)
        if data is None and self._works:
            data = self._try(lambda: self.store.get(name))
        if data is not None:
            return torch.load(io.BytesIO(data), weights_only=True)
        value = load_fn(key)
        if self._works:
            self._pending[name] = _bytes_of(value)
            if len(self._pending) >= self._most:
                self.flush()
        return value

    def flush(self) -> None:
        """Write the values that are in memory only."""
        pending, self._pending = self._pending, {}
        self._try(lambda: self._write(pending))

    def num_keys(self) -> int:
        """Number of values in the store, those of other datasets included, and in memory."""
        return len(self.store) + len(self._pending)

    def _write(self, entries: dict[str, bytes]) -> None:
        if isinstance(self.store, SqliteStore):
            self.store.write(entries)
        else:
            self.store.update(entries)

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - whatever a user's store raises
            self._works = False
            warnings.warn(f"the cache is no longer used: {error!r}", RuntimeWarning, stacklevel=3)
        return None


def _bytes_of(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    data = file.getvalue()
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise TypeError(
            f"a {type(value).__name__} cannot be cached: torch.load(weights_only=True) refuses it "
            f"({str(error).splitlines()[0]}). Cache tensors, numbers and text, or allow the class "
            "with torch.serialization.add_safe_globals"
        ) from error
    return data
