"""A folder of another machine, over SSH."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bagua._core.state.step_folder import Damaged
from bagua._outer.mailbox.store import (
    TEMPORARY,
    CallsInTime,
    Remote,
    client_of,
    holds,
    probe,
    public,
)

_Value = TypeVar("_Value")
_KNOWN_HOSTS = "~/.ssh/known_hosts"


class Sftp:
    """Files on a server of SFTP, with the methods of ``Folder``.

    A file is written under another name and renamed. OpenSSH refuses a rename to a name that is
    taken: it makes a hard link, or looks for the name first where its file system has no links.
    The server's key must be in the user's known_hosts, which fsspec does not read.

    Each call has a connection to itself, since paramiko mixes up answers to two threads.
    Connections are used again, but for those of a call that failed or has not ended.
    """

    pause = Remote.pause

    def __init__(self, url: str, owner: str, writes: bool = True) -> None:
        self._url, self._owner = url, owner
        self.url, self.sent, self.received = public(url), 0, 0
        self._calls = CallsInTime()
        client, path = self._calls.in_time(self._connected, "connecting")
        self._path: str = path.rstrip("/")
        self._idle = [client]
        if writes:
            self._call(lambda client: client.makedirs(self._at(TEMPORARY), exist_ok=True))
            probe(self)

    def _connected(self) -> tuple[Any, str]:
        with _as_os_error():
            client, path = client_of(
                self._url, skip_instance_cache=True, host_key_policy=_known_hosts_only()
            )
            client.client.get_transport().set_keepalive(30)
        return client, path

    def clear(self) -> None:
        """Remove what killed processes of this owner have left."""
        mine = f"{self._owner}."
        left = [name for name in self.names(TEMPORARY) if name.startswith(mine)]
        self.remove("", [f"{TEMPORARY}/{name}" for name in left])

    def create(self, name: str, data: bytearray) -> bool:
        def link(ftp: Any, temporary: str, place: str) -> bool:
            try:
                ftp.rename(temporary, place)
            except OSError:
                ftp.stat(place)  # else it is another failure
                return False
            return True

        made = self._call(partial(self._written, name, data, link), len(data))
        # The answer to an earlier try may have been lost.
        return made or holds(self, name, data)

    def replace(self, name: str, data: bytearray) -> None:
        def take(ftp: Any, temporary: str, place: str) -> None:
            ftp.posix_rename(temporary, place)

        self._call(partial(self._written, name, data, take), len(data))

    def _written(
        self,
        name: str,
        data: bytearray,
        give_name: Callable[[Any, str, str], _Value],
        client: Any,
    ) -> _Value:
        place = self._at(name)
        temporary = self._at(f"{TEMPORARY}/{self._owner}.{secrets.token_hex(8)}")
        if "/" in name:
            with suppress(OSError):  # it is there, or the rename fails
                client.ftp.mkdir(place.rpartition("/")[0])
        try:
            with client.ftp.open(temporary, "wb") as file:
                file.set_pipelined(True)
                file.write(bytes(data))
            made = give_name(client.ftp, temporary, place)
        finally:
            with suppress(OSError):
                client.ftp.remove(temporary)
        self.sent += len(data)
        return made

    def read(self, name: str, most: int) -> bytearray | None:
        def content(client: Any) -> bytearray:
            with client.ftp.open(self._at(name), "rb") as file:
                size = file.stat().st_size
                if size > most:
                    raise Damaged(Path(name), f"it has {size} bytes, of {most} at most")
                file.prefetch(size)
                return bytearray(file.read(size))

        try:
            data = self._call(content, most)
        except FileNotFoundError:
            return None
        self.received += len(data)
        return data

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(self._call(lambda client: client.ftp.listdir(self._at(folder))))
        except FileNotFoundError:
            if folder:
                return []
            raise

    def size(self, name: str) -> int:
        try:
            return int(self._call(lambda client: client.ftp.stat(self._at(name)).st_size))
        except FileNotFoundError:
            return 0

    def remove(self, folder: str, names: list[str]) -> None:
        def removed(client: Any) -> None:
            for name in names:
                with suppress(FileNotFoundError):
                    client.ftp.remove(self._at(f"{folder}/{name}" if folder else name))
            if folder:
                with suppress(OSError):
                    client.ftp.rmdir(self._at(folder))

        self._call(removed)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}".rstrip("/")

    def _call(self, function: Callable[[Any], _Value], carries: int = 0) -> _Value:
        """Call a function with a client, in time. OSError: it may be repeated."""
        return self._calls.in_time(partial(self._with_client, function), "a call of SFTP", carries)

    def _with_client(self, function: Callable[[Any], _Value]) -> _Value:
        try:
            client = self._idle.pop()
        except IndexError:
            client, _ = self._connected()
        try:
            with _as_os_error():
                found = function(client)
        except (FileNotFoundError, Damaged):
            self._idle.append(client)
            raise
        except OSError:
            client.client.close()
            raise
        self._idle.append(client)
        return found


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Have errors of paramiko, and EOFError, be repeated as OSError is."""
    try:
        yield
    except (OSError, ImportError, Damaged):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _known_hosts_only() -> Any:
    """A policy for paramiko: a server whose key the user does not know is refused."""
    import paramiko

    class KnownHosts(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            path = Path(_KNOWN_HOSTS).expanduser()
            known = paramiko.HostKeys(os.fspath(path) if path.exists() else None)
            if not known.check(hostname, key):
                raise paramiko.SSHException(
                    f"the {key.get_name()} key of {hostname} is not in {path}. Compare its "
                    "fingerprint, and add it: ssh-keyscan, or connect once with ssh"
                )

    return KnownHosts()
