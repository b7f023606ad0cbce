"""Names each start of a job: a store outlives the processes that have written to it."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import distributed_c10d as c10d

from bagua import _C
from bagua._core.group import environment as env
from bagua._core.group.store_values import wait_for_keys

__all__ = [
    "OWN_RENDEZVOUS",
    "Callers",
    "agree_on_incarnation",
    "count_visits",
    "refuse_stale_addresses",
]

#: URL with which bagua asks torch for the store that torchrun's agent serves.
OWN_RENDEZVOUS = "env://?for=bagua"
_LONGEST_PAUSE = 0.02  # seconds between two looks of rank 0 at the store
_GRACE = timedelta(seconds=10)  # that ranks give rank 0, which may have come after them


@dataclass(frozen=True)
class Callers:
    """How errors call those that agree on a name, and what each of them has to call."""

    one: str = "rank"
    call: str = "bagua.init_process_group()"


def agree_on_incarnation(
    store: c10d.Store, rank: int, size: int, timeout: timedelta, callers: Callers = Callers()
) -> str:
    """A name shared by exactly the live processes that call this.

    After a restart the store still holds what dead processes wrote under the same ranks. torchrun's
    restart count does not distinguish them: the agent whose process died counts a restart, the
    agents of other nodes see a change of membership and count nothing. So keys that a dead process
    may have written are never taken for fresh:

    1. Every rank but 0 writes a random number of its own and waits for the answer to that number.
    2. Rank 0 draws the name and answers every number it finds, until each rank has confirmed, under
       that name, that it is present. Numbers of dead ranks are answered too, without effect.
    3. Rank 0 publishes that all are present, or which ranks are missing.

    Raises:
        BaguaTimeoutError: rank 0 does not answer, or names missing ranks.
    """
    if size == 1:
        return secrets.token_hex(8)
    if rank == 0:
        return _receive(store, size, timeout, callers)
    number = secrets.token_hex(8)
    store.set(f"bagua/hello/{rank}", number)
    answer = f"bagua/welcome/{number}"
    try:
        wait_for_keys(store, [answer], timeout)
    except _C.BaguaTimeoutError as error:
        raise _C.BaguaTimeoutError(
            f"{callers.one} {rank} of {size}: {callers.one} 0 did not answer within "
            f"{timeout.total_seconds():g} s. Check that it runs and calls {callers.call} too."
        ) from error
    name = str(store.get(answer).decode())
    store.set(f"bagua/{name}/came/{rank}", "")
    wait_for_keys(store, [f"bagua/{name}/missing"], timeout + _GRACE)
    missing = store.get(f"bagua/{name}/missing").decode()
    _raise_if_missing(missing, rank, size, timeout, callers)
    return name


def _receive(store: c10d.Store, size: int, timeout: timedelta, callers: Callers) -> str:
    name = secrets.token_hex(8)
    missing = set(range(1, size))
    answered: set[tuple[int, bytes]] = set()
    pause, deadline = 0.0005, time.monotonic() + timeout.total_seconds()
    while True:
        for rank in sorted(missing):
            if not store.check([f"bagua/hello/{rank}"]):
                continue
            number = store.get(f"bagua/hello/{rank}")
            if (rank, number) not in answered:
                store.set(f"bagua/welcome/{number.decode()}", name)
                answered.add((rank, number))
            elif store.check([f"bagua/{name}/came/{rank}"]):
                missing.discard(rank)
        if not missing or time.monotonic() > deadline:
            text = ", ".join(map(str, sorted(missing)))
            store.set(f"bagua/{name}/missing", text)
            _raise_if_missing(text, 0, size, timeout, callers)
            return name
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def count_visits(store: c10d.Store, rank: int) -> str:
    """A name for bagua's next start over a group of torch's, whose store is the group's alone.

    Waits for no rank, since only members of a subgroup may use bagua. Ranks that start equally
    often, which the script must ensure, get the same name.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{restarts}.{store.add(f'bagua/{restarts}/visits/{rank}', 1)}"


def _raise_if_missing(
    missing: str, rank: int, size: int, timeout: timedelta, callers: Callers
) -> None:
    if missing:
        one = callers.one
        raise _C.BaguaTimeoutError(
            f"{one} {rank} of {size}: {one}{'s' if ',' in missing else ''} {missing} did not come "
            f"within {timeout.total_seconds():g} s. Check that every {one} runs and calls "
            f"{callers.call} too."
        )


def refuse_stale_addresses(init_method: str | None) -> None:
    """Refuse a group that torch.distributed makes by ``init_method`` in a restarted job.

    torchrun's store serves all restarts, and torch's keys in it are equal for all of them, so ranks
    read the addresses of dead processes. They are refused, wait until a timeout, or make a group
    that breaks.

    Raises:
        RuntimeError: names the remedy.
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
