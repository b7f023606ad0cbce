"""Places of a mailbox's files: a folder, or a storage that fsspec reaches.

Note [One truth]
All that islands must agree on is the content of a file that exactly one of them has created. A
folder creates it by a hard link of a finished file, which NFS does atomically as well; an object
store by a conditional put; OpenSSH by a rename. So there is neither a leader nor a clock, and
nobody reads half a file.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bagua._core.state.step_folder import Damaged

if TYPE_CHECKING:
    from bagua._outer.mailbox.places import Place

_Value = TypeVar("_Value")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
TEMPORARY = "tmp"
#: Seconds in which a call of a client ends, and bytes that it carries in each second beyond them.
_SECONDS_OF_A_CALL, _LEAST_RATE = 30.0, 2**17
_MOST_CALLS = 8  # that have not ended: no other is begun


class Folder:
    """A folder of this machine, or of a shared file system.

    Files have names such as ``round-000000003/manifest-0``. Where OSError is raised a call may be
    repeated. Thread safety: all methods.

    Attributes:
        url: for messages, without credentials.
        pause: seconds between two looks, the first and the longest.
        sent: bytes of files so far; ``received`` likewise.
    """

    pause = 0.02, 0.5

    def __init__(self, path: Path, owner: str, writes: bool = True) -> None:
        self._path, self._owner = path.absolute(), owner
        self.url, self.sent, self.received = str(self._path), 0, 0
        if writes:
            (self._path / TEMPORARY).mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Remove what killed processes of this owner have left."""
        for left in (self._path / TEMPORARY).glob(f"{self._owner}.*"):
            left.unlink(missing_ok=True)

    def create(self, name: str, data: bytearray) -> bool:
        """Write a new file; False: there is one, whose content stays."""

        def link(temporary: Path, place: Path) -> bool:
            try:
                os.link(temporary, place)
            except FileExistsError:
                # An answer of NFS may have been lost, and the link was made.
                return os.stat(temporary).st_nlink == 2
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._create_in_place(place, data)
            return True

        return self._written(name, data, link)

    def _create_in_place(self, place: Path, data: bytearray) -> bool:
        """Without links readers may see a part of a file; its seal tells them."""
        created = False
        try:
            with open(place, "xb") as file:
                created = True
                file.write(data)
        except FileExistsError:
            return False
        except OSError:
            if created:  # such as on a full disk: another try is to find no part of it
                place.unlink(missing_ok=True)
            raise
        return True

    def replace(self, name: str, data: bytearray) -> None:
        """Write a file that no other process writes."""
        self._written(name, data, os.replace)

    def _written(
        self, name: str, data: bytearray, give_name: Callable[[Path, Path], _Value]
    ) -> _Value:
        place = self._path / name
        temporary = self._path / TEMPORARY / f"{self._owner}.{secrets.token_hex(8)}"
        if place.parent != self._path:
            place.parent.mkdir(exist_ok=True)  # but not the mailbox, where somebody removed it
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            made = give_name(temporary, place)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        self.sent += len(data)
        return made

    def read(self, name: str, most: int) -> bytearray | None:
        """The content of a file; None: there is none. Damaged: it has more than ``most`` bytes."""
        path = self._path / name
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            handle = os.open(path, flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Damaged(path, "it is a link, which may lead out of the mailbox") from error
            raise
        with open(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise Damaged(path, "it is not a regular file")
            if found.st_size > most:
                raise Damaged(path, f"it has {found.st_size} bytes, of {most} at most")
            data = bytearray(found.st_size)
            del data[file.readinto(data) :]
        self.received += len(data)
        return data

    def names(self, folder: str) -> list[str]:
        """Names of files and folders in a folder, sorted; of none where there is no folder."""
        try:
            return sorted(os.listdir(self._path / folder))
        except FileNotFoundError:
            if folder and self._path.is_dir():
                return []
            raise

    def size(self, name: str) -> int:
        """Bytes of a file; 0: there is none."""
        try:
            return os.stat(self._path / name, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def remove(self, folder: str, names: list[str]) -> None:
        """Remove files of a folder, and the folder where it is empty. They may be gone."""
        for name in names:
            (self._path / folder / name).unlink(missing_ok=True)
        if folder:
            with suppress(OSError):
                (self._path / folder).rmdir()


class Remote:
    """A place that fsspec reaches, with the methods of :class:`Folder`."""

    pause = 0.2, 3.0

    def __init__(self, url: str, writes: bool = True) -> None:
        try:
            self._files, self._path = client_of(url, use_listings_cache=False)
        except TypeError:  # as that of WebDAV, which has neither a cache nor options
            self._files, self._path = client_of(url)
        self.url, self.sent, self.received = public(url), 0, 0
        self._calls = CallsInTime()
        if writes:
            self._check_client()
            probe(self)

    def clear(self) -> None:
        """Nothing is left: a file is there as a whole or not at all."""

    def _check_client(self) -> None:
        """Refuse fsspec's way for clients that have none: two islands at once could be first."""
        from fsspec import AbstractFileSystem

        own = type(self._files)
        if not own.async_impl and own.pipe_file is AbstractFileSystem.pipe_file:
            raise _unfit(self.url, f"{own.__name__} looks for a file before it writes it")

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}".rstrip("/")

    def create(self, name: str, data: bytearray) -> bool:
        try:
            self._make_folder(name)
            self._call("pipe_file", self._at(name), bytes(data), carries=len(data), mode="create")
        except FileExistsError:
            # Clients repeat a put whose answer was lost, and find the file that it has made.
            return holds(self, name, data)
        self.sent += len(data)
        return True

    def replace(self, name: str, data: bytearray) -> None:
        self._make_folder(name)
        self._call("pipe_file", self._at(name), bytes(data), carries=len(data))
        self.sent += len(data)

    def _make_folder(self, name: str) -> None:
        with suppress(FileExistsError):
            self._call("makedirs", self._at(name).rpartition("/")[0], exist_ok=True)

    def read(self, name: str, most: int) -> bytearray | None:
        try:
            found = self._call("cat_file", self._at(name), carries=most, start=0, end=most + 1)
            data = bytearray(found)
        except FileNotFoundError:
            return None
        except TimeoutError:
            raise
        except OSError:  # of an empty file no range can be read, says S3
            if self._call("size", self._at(name)) != 0:
                raise
            data = bytearray()
        if len(data) > most:
            raise Damaged(Path(name), f"it has more than {most} bytes")
        self.received += len(data)
        return data

    def names(self, folder: str) -> list[str]:
        try:
            found = self._call("ls", self._at(folder), detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def size(self, name: str) -> int:
        try:
            return int(self._call("size", self._at(name)) or 0)
        except FileNotFoundError:
            return 0

    def remove(self, folder: str, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._call("rm_file", self._at(f"{folder}/{name}" if folder else name))

    def _call(self, method: str, *arguments: Any, carries: int = 0, **options: Any) -> Any:
        """Call a client in time. ``carries``: bytes at most.

        Its errors, whatever their class, may be repeated as OSError.
        """
        function = partial(getattr(self._files, method), *arguments, **options)
        try:
            return self._calls.in_time(function, method, carries)
        except (OSError, NotImplementedError, TypeError, ValueError):
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {str(error)[:500]}") from error


class CallsInTime:
    """Calls of a client that has no deadline, or one per retry.

    A call that does not end is left to its thread, and repeated by who has called: files are
    created exclusively, so that it changes nothing when it ends after all.
    """

    def __init__(self) -> None:
        self._calls = threading.Semaphore(_MOST_CALLS)

    def in_time(self, function: Callable[[], _Value], what: str, carries: int = 0) -> _Value:
        """Call a function. TimeoutError: it has not ended. ``carries``: bytes at most."""
        seconds = _SECONDS_OF_A_CALL + carries / _LEAST_RATE
        if not self._calls.acquire(timeout=seconds):
            raise TimeoutError(f"{_MOST_CALLS} calls before have not ended")
        ended = threading.Event()
        results, errors = list[_Value](), list[BaseException]()

        def work() -> None:
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001, raised by who waits
                errors.append(error)
            finally:
                self._calls.release()
                ended.set()

        threading.Thread(target=work, name="bagua storage", daemon=True).start()
        if not ended.wait(seconds):
            raise TimeoutError(f"{what} has not ended in {seconds:.0f} s")
        if errors:
            raise errors.pop()
        return results.pop()


def client_of(url: str, **options: Any) -> tuple[Any, str]:
    """fsspec's client of a URL, and the path there. ImportError: there is none."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"Mailbox('{public(url)}') needs fsspec: {_INSTALL}") from error
    try:
        client, path = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        why = without_credentials(str(error), url)
        raise ImportError(
            f"Mailbox('{public(url)}'): fsspec does not reach it ({why}). {_INSTALL}"
        ) from error
    return client, path


def probe(place: Place) -> None:
    """Have a second creation of one file refused; ValueError: it is not."""
    name = f"probe-{secrets.token_hex(8)}"
    try:
        first, second = (place.create(name, bytearray(secrets.token_bytes(8))) for _ in "ab")
    except (NotImplementedError, TypeError, ValueError) as error:
        raise _unfit(place.url, str(error)) from error
    finally:
        with suppress(OSError, NotImplementedError):
            place.remove("", [name])
    if not first or second:
        raise _unfit(place.url, "a second one was not refused")


def _unfit(url: str, why: str) -> ValueError:
    return ValueError(
        f"Mailbox('{url}'): files cannot be created exclusively there ({why}), by which islands "
        "agree on who counts. Take a folder, sftp://, or a storage with conditional writes."
    )


def holds(place: Place, name: str, data: bytearray) -> bool:
    """Whether a file has this content, as after a creation whose answer was lost."""
    try:
        return place.read(name, len(data)) == data
    except Damaged:
        return False


_INSTALL = "pip install '.[mailbox]' in bagua's folder, and the storage's package, such as s3fs"


def public(url: str) -> str:
    """A URL without users, passwords and tokens."""
    return re.sub(r"(?<=://)[^/]*@", "", url).partition("?")[0] if "://" in url else url


def told(error: OSError, url: str) -> str:
    """An error in words, without the credentials of a URL."""
    return without_credentials(f"{type(error).__name__}: {error}", url)


def without_credentials(text: str, url: str) -> str:
    """A text in which those of a URL are blanked, as errors of clients may quote it."""
    if "://" not in url:
        return text
    found = re.findall(r"://([^/]*)@", url)
    secret = [part for users in found for part in (users, users.partition(":")[2])]
    secret += [value for pair in url.partition("?")[2].split("&") for value in pair.split("=")[1:]]
    for part in sorted(filter(None, secret), key=len, reverse=True):
        text = text.replace(part, "...")
    return text
