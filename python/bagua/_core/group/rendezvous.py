"""The job's store: how processes meet there, and values that another rank puts into it.

Values are checked before use: something else than what is expected raises BaguaError.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from bagua import _C
from bagua._core.group import environment as env, variables
from bagua._core.group.warn import warn

#: URL with which bagua asks torch for the store that torchrun's agent serves.
OWN_RENDEZVOUS = "env://?for=bagua"
_GRACE = timedelta(seconds=10)  # that ranks give rank 0, which may have come after them

_log = logging.getLogger("bagua")

Value = TypeVar("Value")

# Limit of a description, which has a line per parameter.
_MOST_BYTES = 256 * 1024**2
_LONGEST_NAME = 64
_PAUSES = 0.0005, 0.02  # seconds from one look at the store to the next: the first, the longest
_SLICE = 0.5  # seconds of one wait, which keeps the store's connection to itself
_HELLO = "bagua/hello"
_MOST_HELLO = 2**20  # bytes
_MOST_NAMED = 16  # ranks in an error


def rendezvous(
    store: c10d.Store | None,
    rank: int,
    world_size: int,
    local_world_size: int,
    timeout: timedelta | None,
) -> tuple[int, int, c10d.Store]:
    """Place of this process in the job; see ``init_process_group`` for arguments and errors."""
    if store is not None:
        if not isinstance(store, c10d.Store):
            raise TypeError(
                f"init_process_group(store={store!r}): the first argument is a store of "
                "torch.distributed, not the backend; write init_process_group(backend=...), or "
                "init_process_group() for gloo, and NCCL for CUDA tensors"
            )
        if not (0 <= rank < world_size) or local_world_size <= 0:
            raise ValueError(
                "init_process_group(store=...) needs 0 <= rank < world_size and "
                f"local_world_size > 0, got rank={rank}, world_size={world_size}, "
                f"local_world_size={local_world_size}"
            )
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank % local_world_size),
            LOCAL_WORLD_SIZE=str(local_world_size),
            NODE_RANK=str(rank // local_world_size),
        )
        return rank, world_size, store
    if not is_one_of_several():
        _tell_alone()
        return 0, 1, dist.HashStore()  # type: ignore[attr-defined]
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise ValueError(
            f"environment variable(s) {', '.join(missing)} not set; start the script with "
            "torchrun --nproc_per_node=N script.py, which sets them"
        )
    patience = timeout or c10d.default_pg_timeout
    sockets = _C.OpenedSockets()
    try:
        found, rank, world_size = _C.interruptible(
            next, torch_rendezvous(OWN_RENDEZVOUS, timeout=patience)
        )
        sockets.give_up_after(patience.total_seconds())
    except dist.DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise _C.BaguaError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: the job's store at {place} "
            f"could not be made or reached: {error}. It is with torchrun's agent, or else with "
            "rank 0; check that all ranks run and that MASTER_ADDR and MASTER_PORT are its."
        ) from error
    return rank, world_size, found


def is_one_of_several() -> bool:
    """Whether a launcher has given this process a place, which is then in torchrun's variables."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return True
    from bagua._core.group.launchers import adopt_place

    return adopt_place()


def _tell_alone() -> None:
    if variables.parent_process() is None:
        _log.info("no launcher: a single process. Use torchrun for more.")
        return
    warn(
        "multiprocessing has started this process, and neither RANK nor WORLD_SIZE is set: it "
        "trains alone. Where it is one of several ranks, set RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT, or call torch.distributed.init_process_group(rank=..., world_size=...) first",
        RuntimeWarning,
    )


def connect_store(address: str, timeout: timedelta) -> c10d.Store:
    """A connection to the store at ``address``, ``"host:port"``.

    Raises ValueError for a malformed address, BaguaError if no store answers.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"store={address!r} is not an address, such as '10.0.0.1:29500'")
    sockets = _C.OpenedSockets()
    try:
        store: c10d.Store = _C.interruptible(
            lambda: dist.TCPStore(  # type: ignore[attr-defined]
                host.strip("[]"), int(port), is_master=False, timeout=timeout
            )
        )
    except dist.DistError as error:
        raise _C.BaguaError(
            f"there is no store at {address}: {error}. It is that of a torchrun agent with "
            "--master-addr and --master-port, or a TCPStore of your own, and must outlive ranks"
        ) from error
    sockets.give_up_after(timeout.total_seconds())
    return store


def tcp_store(store: c10d.Store) -> Any:
    """The store behind prefixes, which need not be of TCP."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return store


def keep_connections(store: c10d.Store, timeout: timedelta) -> None:
    """As ``OpenedSockets.give_up_after``, for connections that others have made: those to
    ``store``, and those of torch's groups."""
    port = getattr(tcp_store(store), "port", None)  # neither files nor memory have one
    _C.torch_sockets_give_up_after(timeout.total_seconds(), -1 if port is None else port)


def agree_on_incarnation(
    store: c10d.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    called: str = "rank",
    call: str = "bagua.init_process_group()",
) -> str:
    """A name shared by exactly the live processes that call this.

    After a restart the store still holds what dead processes wrote under the same ranks. torchrun's
    restart count does not distinguish them: the agent whose process died counts a restart, the
    agents of other nodes see a change of membership and count nothing. So keys that a dead process
    may have written are never taken for fresh:

    1. Every rank but 0 appends a random number to a list and waits for the answer to that number.
    2. Rank 0 draws the name and answers every number of the list, until each rank has confirmed,
       under that name, that it is present. Numbers of dead ranks are answered too, without effect.
    3. Rank 0 publishes that all are present, or which ranks are missing, and deletes the list,
       the answers, and all keys under names of starts before.

    ``called``, ``call``: what errors call those that agree, and what each of them has to call.

    Raises:
        BaguaTimeoutError: rank 0 does not answer, or names missing ranks.
    """
    if size == 1:
        return secrets.token_hex(8)
    if rank == 0:
        name = secrets.token_hex(8)
        missing = _receive(store, name, size, timeout)
    else:
        number = secrets.token_hex(8)
        append(store, _HELLO, f"{rank} {number}\n")
        answer = f"bagua/welcome/{number}"
        try:
            wait_for_keys(store, [answer], timeout)
        except _C.BaguaTimeoutError as error:
            raise _C.BaguaTimeoutError(
                f"{called} {rank} of {size}: {called} 0 did not answer within "
                f"{timeout.total_seconds():g} s. Check that it runs and calls {call} too."
            ) from error
        name = stored_name(store, answer)
        append(store, f"bagua/{name}/came", f"{rank} {number}\n")
        wait_for_keys(store, [f"bagua/{name}/missing"], timeout + _GRACE)
        missing = stored_value(
            store, f"bagua/{name}/missing", lambda ranks: [int(other) for other in ranks]
        )
    if missing:
        listed = ", ".join(map(str, missing[:_MOST_NAMED])) + ", ..." * (len(missing) > _MOST_NAMED)
        raise _C.BaguaTimeoutError(
            f"{called} {rank} of {size}: {called}{'s' if len(missing) > 1 else ''} {listed} did "
            f"not come within {timeout.total_seconds():g} s. Check that every {called} runs and "
            f"calls {call} too."
        )
    return name


def _receive(store: c10d.Store, name: str, size: int, timeout: timedelta) -> list[int]:
    """Rank 0's part; the ranks that are missing."""
    answered: set[str] = set()
    came: dict[str, str] = {}
    pause, deadline = Pause(*_PAUSES), time.monotonic() + timeout.total_seconds()
    while True:
        came |= {rank: number for rank, number in _pairs(store, f"bagua/{name}/came")}
        for _, number in _pairs(store, _HELLO):
            if number not in answered:
                store.set(f"bagua/welcome/{number}", name)
                answered.add(number)
        missing = [rank for rank in range(1, size) if str(rank) not in came]
        if not missing or time.monotonic() > deadline:
            break
        pause.take()
    store.set(f"bagua/{name}/missing", json.dumps(missing))
    if not missing:
        # A number that is not among those that came is of a dead process: nobody reads the answer,
        # and nobody anything of starts before this one.
        forget(store, [_HELLO, f"bagua/{name}/came", *(f"bagua/welcome/{n}" for n in answered)])
        before = re.compile(f"bagua/(?!{name}/)[0-9a-f]{{16}}/")
        forget(store, filter(before.match, keys_in(store)))
    return missing


def _pairs(store: c10d.Store, key: str) -> list[tuple[str, str]]:
    """A rank and its number, from each line that ranks have appended to ``key``."""
    value = read(store, key)
    pairs = [tuple(line.split(b" ")) for line in value.splitlines()]
    if len(value) > _MOST_HELLO or not all(len(p) == 2 and all(map(is_name, p)) for p in pairs):
        _refuse(key, value, "not a list of ranks")
    return [(rank.decode("ascii"), number.decode("ascii")) for rank, number in pairs]


def count_visits(store: c10d.Store, rank: int) -> str:
    """A name for bagua's next start over a group of torch's, whose store is the group's alone.

    Waits for no rank, since only members of a subgroup may use bagua. Ranks that start equally
    often, which the script must ensure, get the same name.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{restarts}.{store.add(f'bagua/{restarts}/visits/{rank}', 1)}"


def refuse_stale_addresses(init_method: str | None) -> None:
    """Raise RuntimeError for a group that torch.distributed makes in a restarted job.

    torch's keys in torchrun's store are equal for all restarts, so ranks read the addresses of dead
    processes: they are refused, wait until a timeout, or make a group that breaks.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    by_launcher = (init_method or "").startswith(("env://", "tcp://"))
    if restarts == "0" or not shared or not by_launcher or env.get_world_size() == 1:
        return
    raise RuntimeError(
        f"torchrun has restarted this job (TORCHELASTIC_RESTART_COUNT={restarts}), and its store "
        "still has the addresses of the processes before, which torch.distributed's "
        "init_process_group() would take for those of this start. Call bagua.init_process_group() "
        "instead: it makes torch's default group as well, under keys of this start alone."
    )


def wait_for_keys(store: c10d.Store, keys: Sequence[str], timeout: timedelta) -> None:
    """Return once the store has all ``keys``; BaguaTimeoutError names those that are missing.

    The store wakes it. Between slices others may use the store's connection; Ctrl-C ends it.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while not has_come(store, keys, deadline - time.monotonic()):
        if time.monotonic() > deadline:
            missing = ", ".join(f"'{key}'" for key in keys if not store.check([key]))
            raise _C.BaguaTimeoutError(
                f"within {timeout.total_seconds():g} s the job's store has not got {missing}: a "
                "rank that writes it did not come"
            )
        time.sleep(_PAUSES[0])


def has_come(store: c10d.Store, keys: Sequence[str], seconds: float) -> bool:
    """Whether the store has all ``keys``; waits for them, at most ``seconds`` and a slice."""
    limit, begun = min(max(seconds, 0.001), _SLICE), time.monotonic()
    try:
        _C.interruptible(store.wait, list(keys), timedelta(seconds=limit))
    except RuntimeError:
        if time.monotonic() - begun < limit / 2:
            raise  # the store does not work
        return False
    return True


class Pause:
    """Sleeps between looks at the store, each time twice as long, from ``first`` to ``longest``
    seconds: torch prints two lines for each wait that times out."""

    def __init__(self, first: float, longest: float) -> None:
        self._seconds, self._longest = first, longest

    def take(self) -> None:
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, self._longest)


def read(store: c10d.Store, key: str) -> bytes:
    """The value of ``key``; empty: there is none. One request, where ``get`` of torch makes two."""
    return bytes(store.compare_set(key, "", ""))


def append(store: c10d.Store, key: str, text: str) -> None:
    """Append ``text`` to the value of ``key``, which others may do at the same time."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        store.append(key, text)  # type: ignore[attr-defined]
        return
    before, after = "", text
    while (found := bytes(store.compare_set(key, before, after)).decode("latin-1")) != after:
        before, after = found, found + text


def keys_in(store: c10d.Store) -> list[str]:
    """All keys; none where the store cannot list them."""
    with suppress(RuntimeError, NotImplementedError):
        return _C.keys_of(store)
    return []


def forget(store: c10d.Store, keys: Iterable[str]) -> None:
    """Delete ``keys``, where the store knows how."""
    with suppress(RuntimeError, NotImplementedError):
        for key in keys:
            store.delete_key(key)


def whole(word: Any, below: int = 1 << 63, least: int = 0) -> int:
    """A whole number from ``least`` up to, not including, ``below``; else ValueError."""
    if type(word) is not int or not least <= word < below:
        raise ValueError(word)
    return word


def number_in(value: bytes, key: str, below: int) -> int:
    """The number from 0 up to, not including, ``below`` that the ``value`` of ``key`` is."""
    return value_in(
        value, key, lambda word: whole(word, below), 20, f"not a number from 0 to {below - 1}"
    )


def lines_in(value: bytes, key: str) -> list[str]:
    """The lines of text, a JSON list, that the ``value`` of ``key`` is."""
    return value_in(value, key, _lines_from, what="not a list of lines")


def _lines_from(word: Any) -> list[str]:
    if not isinstance(word, list) or not all(isinstance(line, str) for line in word):
        raise TypeError(word)
    return word


def value_in(
    value: bytes,
    key: str,
    read: Callable[[Any], Value],
    most_bytes: int = _MOST_BYTES,
    what: str = "not of the form that it should be",
) -> Value:
    """Give ``read`` the JSON in the ``value`` of ``key``; errors call the value ``what``."""
    try:
        if len(value) <= most_bytes:
            return read(json.loads(value))
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError):
        pass
    _refuse(key, value, what)


def stored_number(store: c10d.Store, key: str, below: int) -> int:
    """The number from 0 up to, not including, ``below`` that is under ``key``."""
    return number_in(bytes(store.get(key)), key, below)


def stored_lines(store: c10d.Store, key: str) -> list[str]:
    """The lines of text, a JSON list, that are under ``key``."""
    return lines_in(bytes(store.get(key)), key)


def stored_value(store: c10d.Store, key: str, read: Callable[[Any], Value]) -> Value:
    return value_in(bytes(store.get(key)), key, read)


def stored_name(store: c10d.Store, key: str) -> str:
    """The random name that is under ``key``."""
    return name_in(bytes(store.get(key)), key)


def name_in(value: bytes, key: str) -> str:
    """The random name that the ``value`` of ``key`` is."""
    if not is_name(value):
        _refuse(key, value, "not a name")
    return value.decode("ascii")


def is_name(value: bytes) -> bool:
    return 0 < len(value) <= _LONGEST_NAME and value.isalnum()


def _refuse(key: str, value: bytes, what: str) -> NoReturn:
    raise _C.BaguaError(
        f"the store has {value[:40]!r} ({len(value)} bytes) under '{key}', which is {what}: "
        "something that is not a rank of this job has written to it. Keep the store's port "
        "(MASTER_PORT) from others: docs/security.md."
    )
