"""Names of islands: each has one process, which others can see is alive.

Note [Claims]
A claim is a file ``islands/<island>-<n>``, created exclusively, whose content its process changes
every few seconds. Clocks of machines may be hours apart, so nobody compares times: a claim lives
while others see its content change. Who finds a claim of its island that does not change takes the
next number; the process before, should it still be there, sees that number, and ends. A claim also
names its process, which one that is started again on that machine can see is gone, without a wait.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bagua import _C
from bagua._core.state.step_folder import Damaged
from bagua._outer.mailbox import letters
from bagua._outer.mailbox.patience import Patience
from bagua._outer.mailbox.places import Place

_BEAT = 3.0  # seconds between two changes of a claim
#: Seconds after which a claim that does not change is of a process that is dead or cut off.
_SILENCE = 15.0
_FOLDER = "islands"
_NAME = re.compile(r"([A-Za-z0-9_-]{1,64})-(\d{1,9})", re.ASCII)
_MOST_NAMES = 4 * letters.MOST_ISLANDS
_MOST_ATTEMPTS = 16


class Process(NamedTuple):
    """Names a process: its machine and namespace, its number, and when it was started."""

    at: str
    pid: int
    began: int

    @staticmethod
    def own() -> Process:
        namespace = os.readlink("/proc/self/ns/pid")
        machine = Path("/proc/sys/kernel/random/boot_id").read_text() + namespace
        at = hashlib.sha256(machine.encode()).hexdigest()[:16]
        return Process(at, os.getpid(), _began(os.getpid()) or 0)

    def is_gone(self) -> bool:
        """Whether it was on this machine, and has ended."""
        return self.at == Process.own().at and _began(self.pid) != self.began


def _began(pid: int) -> int | None:
    """When a process of this machine was started, in ticks; None: it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


class _Life(NamedTuple):
    """Contents of a claim; the beat changes while its process lives."""

    life: str
    beat: int
    process: Process


class _Seen(NamedTuple):
    life: _Life
    since: float
    changed: bool  # since it was seen first


class Lives:
    """The claims as this process has seen them. Thread safety: one thread at a time.

    ``clock``: seconds, by which a claim is silent.
    """

    def __init__(
        self,
        place: Place,
        run: str,
        secret: bytes | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place, self._run, self._secret, self._clock = place, run, secret, clock
        self._seen: dict[str, _Seen] = {}

    def look(self) -> dict[str, int]:
        """Read all claims; the newest number of each island. OSError: it may be repeated."""
        numbers: dict[str, int] = {}
        lives: dict[str, _Life] = {}
        for name in self._place.names(_FOLDER)[:_MOST_NAMES]:
            match = _NAME.fullmatch(name)
            if match is None or int(match[2]) <= numbers.get(match[1], 0):
                continue
            with suppress(Damaged):
                life = self.read(name)
                if life is not None:
                    numbers[match[1]], lives[match[1]] = int(match[2]), life
        now = self._clock()
        for island, life in lives.items():
            before = self._seen.get(island)
            if before is None:
                self._seen[island] = _Seen(life, now, False)
            elif before.life != life:
                self._seen[island] = _Seen(life, now, True)
        for island in self._seen.keys() - lives.keys():
            del self._seen[island]
        return numbers

    def read(self, name: str) -> _Life | None:
        """The contents of a claim; None: there is no such file. Damaged: it is not a claim."""
        path = f"{_FOLDER}/{name}"
        data = self._place.read(path, letters.FIXED_BYTES + letters.MOST_FIELDS)
        if data is None:
            return None
        fields = letters.opened(path, data, letters.CLAIM, 0, self._secret).fields
        life, beat, process = (fields.get(key) for key in ("life", "beat", "process"))
        if (fields.get("run"), fields.get("claim")) != (self._run, name) or not (
            letters.is_hex(life)
            and type(beat) is int
            and type(process) is list
            and [type(each) for each in process] == [str, int, int]
        ):
            raise Damaged(Path(path), "it is of another run or island")
        return _Life(str(life), beat, Process(*process))

    def alive(self) -> set[str]:
        """Islands whose claims have changed lately, or were seen for the first time."""
        now = self._clock()
        return {island for island, seen in self._seen.items() if now - seen.since < _SILENCE}

    def is_gone(self, island: str) -> bool:
        """Whether the claim is of a process of this machine that has ended."""
        return island in self._seen and self._seen[island].life.process.is_gone()

    def beats(self, island: str) -> bool:
        """Whether the claim has changed since it was seen first."""
        return island in self._seen and self._seen[island].changed


class Claim:
    """This process's claim to an island's name, renewed by a thread until it ends."""

    def __init__(self, place: Place, run: str, secret: bytes | None, island: str) -> None:
        self._place, self._run, self._secret, self.island = place, run, secret, island
        self._life, self._beat, self._renewed = secrets.token_hex(8), 0, 0
        self._process = Process.own()
        self._lives = Lives(place, run, secret)
        self._name = ""
        self._end = threading.Event()
        self._lost = False
        self._thread: threading.Thread | None = None

    def take(self, patience: Patience) -> None:
        """Claim the name. BaguaError: another process has it."""
        patience.doing = f"whether another process is island '{self.island}'"
        while True:
            numbers = patience.repeat("looking for islands", self._lives.look)
            if self.island not in self._lives.alive() or self._lives.is_gone(self.island):
                break
            if self._lives.beats(self.island):
                raise self._refused()
            patience.pause()
        before = numbers.get(self.island, 0)
        for number in range(before + 1, before + 1 + _MOST_ATTEMPTS):
            self._name = f"{self.island}-{number}"
            if patience.repeat("claiming a name", self._create):
                break
            with suppress(Damaged):
                if patience.repeat("looking for islands", lambda: self._lives.read(self._name)):
                    raise self._refused()
        else:
            raise self._refused()
        old = [f"{self.island}-{number}" for number in range(1, before + 1)][-_MOST_ATTEMPTS:]
        patience.repeat("claiming a name", lambda: self._place.remove(_FOLDER, old))
        patience.repeat("removing what is left", self._place.clear)
        self._thread = threading.Thread(target=self._renew, name="bagua claim", daemon=True)
        self._thread.start()

    def _refused(self) -> _C.BaguaError:
        return _C.BaguaError(
            f"mailbox {self._place.url}: another process is island '{self.island}', and lives. "
            "Give each island another name; if it is being started again, end the process "
            "before."
        )

    def clock(self) -> float:
        """Seconds in which this claim could be renewed.

        By them others are not silent while the storage answers nobody, or this process is stopped.
        """
        return self._renewed * _BEAT

    def check(self) -> None:
        """BaguaError: another process has taken the name, as this one was silent."""
        if self._lost:
            raise _C.BaguaError(
                f"mailbox {self._place.url}: another process has taken the name of island "
                f"'{self.island}', as this one was stopped or cut off for {_SILENCE:g} s or more. "
                "End one of them."
            )

    def _create(self) -> bool:
        return self._place.create(f"{_FOLDER}/{self._name}", self._letter())

    def _letter(self) -> bytearray:
        self._beat += 1
        fields = {"run": self._run, "claim": self._name, "life": self._life, "beat": self._beat}
        fields["process"] = list(self._process)
        data = letters.written(letters.CLAIM, fields, 0, self._secret)
        letters.sealed(data, self._secret)
        return data

    def _renew(self) -> None:
        while not self._end.wait(_BEAT):
            with suppress(OSError, Damaged):  # the next beat may succeed
                number = int(self._name.rpartition("-")[2])
                newest = self._lives.look().get(self.island, 0)
                own = self._lives.read(self._name)
                if newest > number or (own is not None and own.life != self._life):
                    self._lost = True
                    return
                if own is None and not self._create():
                    continue
                self._place.replace(f"{_FOLDER}/{self._name}", self._letter())
                self._renewed += 1
        with suppress(OSError):
            self._place.remove(_FOLDER, [self._name])

    def end(self) -> None:
        """Have the thread give the name back. Does not wait."""
        self._end.set()

    def release(self, seconds: float) -> None:
        """Give the name back, and wait for that so many seconds at most."""
        self.end()
        if self._thread is not None:
            self._thread.join(seconds)
