"""The files of one run in a mailbox, by their names: written, read and checked.

Note [Files of a mailbox]
- ``run``: the name of the run, and the plan that all islands must have.
- ``islands/<island>-<n>``: claims (``claims.py``).
- ``anchor-<N>``: anchors and the outer optimizer's state after N rounds, every ``keep`` rounds.
- ``round-<N>/from-<island>-<seal>``: contributions to the round after N rounds.
- ``round-<N>/shard-<n>-<island>-<seal>``, ``shards-<N>/shard-<n>-<seal>``: shards that the ranks
  of an island hold, of contributions and of anchors. Those that name them are written last.
- ``round-<N>/manifest-<k>``: who counts. The first that is whole decides; there are others only
  where one was damaged.
- ``tmp/``: files that are being written to a folder.

Two anchors stay, and the rounds from the older one on: at most 2 keep + 1 where islands live, and
for each time that those whose turn it is are killed, a round more: 2 (keep + islands) + 1. Where
islands have shards, an island that stands in mails the anchor in its next round: two rounds more.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from bagua import _C
from bagua._core.group.warn import warn_here
from bagua._core.state.step_folder import Damaged, refusing
from bagua._outer.mailbox import letters
from bagua._outer.mailbox.letters import Contribution, Counted, Letter, Manifest
from bagua._outer.mailbox.places import Place

_ANCHOR = re.compile(r"anchor-(\d{9})", re.ASCII)
_ROUND = re.compile(r"round-(\d{9})", re.ASCII)
_FROM = re.compile(r"from-([A-Za-z0-9_-]{1,64})-([0-9a-f]{16})", re.ASCII)
_MANIFEST = re.compile(r"manifest-\d", re.ASCII)
_SHARD = re.compile(r"shard-\d{1,3}-([A-Za-z0-9_-]{1,64})-[0-9a-f]{16}", re.ASCII)
_SHARDS = re.compile(r"shards-(\d{9})", re.ASCII)
_MOST_MANIFESTS = 8
_MOST_NAMES = 4 * letters.MOST_ISLANDS  # of a folder that are looked at
_MOST_PLAN = 2**26  # bytes of text
_MOST_ANCHOR = 16  # bytes of an anchor file for each of the anchors, beyond a MiB
_LOOKS = 4  # at a damaged file
_BETWEEN_FIRST_AND_LAST = 2.0  # seconds: a file may still be under way


Value = TypeVar("Value")


class Received(NamedTuple):
    """A contribution that was checked, with what a manifest says of it."""

    counted: Counted
    contribution: Contribution
    body: memoryview


class Sealed(NamedTuple):
    """A file that is to be mailed."""

    path: str
    data: bytearray
    seal: str


class _Damage(NamedTuple):
    first: float  # when it was seen
    looks: int
    why: str


class Box:
    """Thread safety: one thread at a time. OSError: a call may be repeated.

    Args:
        secret: of the seals; None: they are digests.
        bodies: bytes of a contribution, by fragment; none: only manifests and names are read.
        shard: of ``shards``, which is read and written here. One: contributions have bodies.
    """

    def __init__(
        self,
        place: Place,
        secret: bytes | None,
        bodies: Sequence[int],
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        self.place, self.secret = place, secret
        self.shard, self.shards = shard, shards
        self._own: Sealed | None = None  # the shard that was mailed last
        self.run = ""
        self._bodies = list(bodies)
        self._damaged: dict[str, _Damage] = {}
        self._told: set[str] = set()

    def open_run(self, plan: Sequence[str]) -> None:
        """Begin the run, or find out its name; BaguaMismatchError: it has another plan."""
        text = "\n".join(plan).encode()
        letter = self._run_letter()
        if letter is None:
            run = secrets.token_hex(8)
            if self._write("run", letters.RUN, {"run": run}, text):
                self.run = run
                return
            raise FileExistsError("run: another island has just begun it")
        if letter.body != text:
            theirs = bytes(letter.body).decode(errors="replace").splitlines()
            own = text.decode().splitlines()
            same = 0
            while theirs[same : same + 1] == own[same : same + 1] != []:
                same += 1
            words = [_short(lines[same : same + 1]) for lines in (theirs, own)]
            raise _C.BaguaMismatchError(
                f"mailbox {self.place.url}: its run was begun with {words[0]}, and this island has "
                f"{words[1]}. Give all islands the same model, codec, fragments, weight, outer "
                "optimizer and number of shards, or this one another URL."
            )
        self.run = letter.fields["run"]

    def known_run(self) -> str:
        """The name of the run that others have begun; BaguaError: there is none."""
        letter = self._run_letter()
        if letter is None:
            raise _C.BaguaError(f"{self.place.url}: no island has begun a run there")
        return str(letter.fields["run"])

    def _run_letter(self) -> Letter | None:
        letter = self._read("run", letters.RUN, _MOST_PLAN)
        if letter is not None and not (
            set(letter.fields) == {"run"} and letters.is_hex(letter.fields["run"])
        ):
            raise Damaged("run", "its fields are others")
        return letter

    # Rounds.

    def rounds(self) -> list[int]:
        """Numbers of the rounds that have files, the oldest first."""
        found = (_ROUND.fullmatch(name) for name in self.place.names(""))
        return sorted(int(match[1]) for match in found if match)

    def contribute(self, own: Contribution, body: bytearray) -> Received:
        """Write a contribution. ``body``: as :func:`letters.written` has made it, filled."""
        seal = letters.sealed(body, self.secret)
        counted = Counted(own.island, seal, own.weight)
        self.place.create(f"{_folder(own.round)}/{counted.name}", body)
        return Received(counted, own, letters.body_of(body))

    def new_contribution(self, own: Contribution) -> bytearray:
        size = self._bodies[own.part]
        if self.shards == 1:
            return letters.written(letters.CONTRIBUTION, own.fields(), size, self.secret)
        return letters.written(letters.SHARD, self._shard_fields(own), size, self.secret)

    def contributions(self, number: int) -> dict[str, list[str]]:
        """Names of the files of a round's contributions, by island."""
        found: dict[str, list[str]] = {}
        for name in self.place.names(_folder(number))[:_MOST_NAMES]:
            if match := _FROM.fullmatch(name):
                found.setdefault(match[1], []).append(name)
            elif not _MANIFEST.fullmatch(name) and not _SHARD.fullmatch(name):
                self._tell(f"{_folder(number)}/{name}", "no island gives a file such a name")
        return found

    def contribution(self, number: int, part: int, name: str) -> Received | None:
        """A contribution; None: it is not there, not whole yet, or refused for good.

        Its body is that of this rank's shard, where islands have shards.
        """
        path, match = f"{_folder(number)}/{name}", _FROM.fullmatch(name)
        if match is None or self._is_refused(path):
            return None
        try:
            size = self._bodies[part] if self.shards == 1 else 0
            letter = self._read(path, letters.CONTRIBUTION, size)
            if letter is None:
                return None
            found = Contribution.of(path, letter.fields)
            place = found.run, found.island, found.round
            if place != (self.run, match[1], number) or letter.seal[:16] != match[2]:
                raise Damaged(path, "it is of another run, island or round, or was renamed")
            if len(found.shards) != (self.shards if self.shards > 1 else 0):
                raise Damaged(path, f"it has {len(found.shards)} shards, and not {self.shards}")
            if found.part != part or len(letter.body) != size:
                raise Damaged(path, f"it is of fragment {found.part}, and {part} is due")
        except Damaged as error:
            self._refuse(path, error)
            return None
        body = letter.body if self.shards == 1 else self._shard_of(found)
        if body is None:
            return None
        return Received(Counted(found.island, letter.seal, found.weight), found, body)

    # Shards of contributions.

    def sealed_shard(self, own: Contribution, data: bytearray) -> Sealed:
        """This rank's shard. ``data``: as :meth:`new_contribution` has made it, filled."""
        seal = letters.sealed(data, self.secret)
        name = f"shard-{self.shard}-{own.island}-{seal[:16]}"
        self._own = Sealed(f"{_folder(own.round)}/{name}", data, seal)
        return self._own

    def mail(self, file: Sealed) -> None:
        """Write a shard, which may be there."""
        self.place.create(file.path, file.data)

    def contribute_shards(self, own: Contribution, shard: Sealed) -> Received:
        """Make a contribution whole, whose shards are there. ``shard``: of this rank."""
        data = letters.written(letters.CONTRIBUTION, own.fields(), 0, self.secret)
        received = self.contribute(own, data)
        return received._replace(body=letters.body_of(shard.data))

    def shards_there(self, own: Contribution) -> bool:
        """Whether all shards of a contribution are there."""
        names = {own.shard_name(shard) for shard in range(len(own.shards))}
        return names <= set(self.place.names(_folder(own.round)))

    def shard_paths(self, number: int) -> dict[str, list[str]]:
        """Files of shards in a round by island, also of contributions that do not count."""
        found: dict[str, list[str]] = {}
        for name in self.place.names(_folder(number)):
            if match := _SHARD.fullmatch(name):
                found.setdefault(match[1], []).append(f"{_folder(number)}/{name}")
        return found

    def _shard_fields(self, own: Contribution) -> dict[str, Any]:
        fields = {"run": self.run, "island": own.island, "round": own.round, "part": own.part}
        return {**fields, "shard": self.shard}

    def _shard_of(self, found: Contribution) -> memoryview | None:
        """The body of this rank's shard of a contribution; None: as :meth:`contribution`."""
        path = f"{_folder(found.round)}/{found.shard_name(self.shard)}"
        seal = found.shards[self.shard]
        if self._own is not None and (self._own.path, self._own.seal) == (path, seal):
            return letters.body_of(self._own.data)
        if self._is_refused(path):
            return None
        try:
            letter = self._read(path, letters.SHARD, self._bodies[found.part])
            if letter is None:
                return None
            size = len(letter.body)
            if letter.seal != seal or letter.fields != self._shard_fields(found):
                raise Damaged(path, "it is not the shard that its contribution names")
            if size != self._bodies[found.part]:
                raise Damaged(path, f"it has {size} bytes, and not {self._bodies[found.part]}")
        except Damaged as error:
            self._refuse(path, error)
            return None
        return letter.body

    # Manifests.

    def manifest(self, number: int) -> Manifest | int:
        """The manifest of a round, or the number of the first one that nobody has written yet."""
        for attempt in range(_MOST_MANIFESTS):
            path = f"{_folder(number)}/manifest-{attempt}"
            if self._is_refused(path):
                continue
            try:
                letter = self._read(path, letters.MANIFEST, 0)
                if letter is None:
                    return attempt
                found = Manifest.of(path, letter.fields)
                if (found.run, found.round) != (self.run, number):
                    raise Damaged(path, "it is of another run or round")
                if self._bodies and found.part != number % len(self._bodies):
                    raise Damaged(path, f"it is of fragment {found.part}")
            except Damaged as error:
                if not self._refuse(path, error):
                    return -1
                continue
            return found
        raise _C.BaguaError(
            f"mailbox {self.place.url}: {_MOST_MANIFESTS} manifests of round {number} are damaged, "
            "one after the other. See who writes there, and give all islands a secret."
        )

    def decide(self, manifest: Manifest, attempt: int) -> bool:
        """Write a manifest; False: there is one."""
        path = f"{_folder(manifest.round)}/manifest-{attempt}"
        return self._write(path, letters.MANIFEST, manifest.fields())

    # Anchors.

    def anchors(self) -> list[int]:
        """How many rounds the anchors that lie there have behind them, the oldest first."""
        found = (_ANCHOR.fullmatch(name) for name in self.place.names(""))
        names = [match for match in found if match and not self._is_refused(match[0])]
        return sorted(int(match[1]) for match in names)

    def put_anchor(
        self,
        counters: Mapping[str, int],
        counted: Mapping[str, int],
        tensors: Mapping[str, torch.Tensor],
    ) -> bool:
        """Write an anchor, with ``rounds`` among the counters; False: there is one.

        ``counted``: the last round of islands, ``MOST_ISLANDS`` at most.
        """
        table, size = letters.table_of(tensors)
        fields = {"run": self.run, "counters": dict(counters), "table": len(table)}
        fields["counted"] = list(counted.items())
        data = letters.written(letters.ANCHOR, fields, len(table) + size, self.secret)
        _fill(data, table, tensors)
        letters.sealed(data, self.secret)
        return self.place.create(_anchor(counters["rounds"]), data)

    def sealed_anchor_shard(self, number: int, tensors: Mapping[str, torch.Tensor]) -> Sealed:
        """This rank's shard of the anchor after so many rounds."""
        table, size = letters.table_of(tensors)
        fields = {"run": self.run, "round": number, "shard": self.shard, "table": len(table)}
        data = letters.written(letters.ANCHOR_SHARD, fields, len(table) + size, self.secret)
        _fill(data, table, tensors)
        seal = letters.sealed(data, self.secret)
        return Sealed(f"{_shards(number)}/{_anchor_shard(self.shard, seal)}", data, seal)

    def anchor_shards_there(self, number: int, seals: Sequence[str]) -> bool:
        names = {_anchor_shard(shard, seal) for shard, seal in enumerate(seals)}
        return names <= set(self.place.names(_shards(number)))

    def put_anchor_of_shards(
        self, counters: Mapping[str, int], counted: Mapping[str, int], seals: Sequence[str]
    ) -> bool:
        """Make an anchor whole, whose shards are there; False: there is one."""
        fields = {"run": self.run, "counters": dict(counters), "table": 0}
        fields |= {"counted": list(counted.items()), "shards": list(seals)}
        return self._write(_anchor(counters["rounds"]), letters.ANCHOR, fields)

    def anchor(
        self,
        number: int,
        like: Mapping[str, torch.Tensor],
        made: Callable[[Mapping[str, torch.Tensor]], Value],
    ) -> tuple[dict[str, int], dict[str, int], Value] | None:
        """(counters, last rounds of islands, what ``made`` makes of tensors by key) of an anchor.

        None: it is not there, not whole yet, or refused for good. ``like``: the state here, which
        bounds its size. ``made`` may raise ValueError.
        """
        name = _anchor(number)
        most = 2**20 + _MOST_ANCHOR * sum(tensor.nbytes + 64 for tensor in like.values())
        if self._is_refused(name):
            return None
        try:
            letter = self._read(name, letters.ANCHOR, most)
            if letter is None:
                return None
            counters = letter.fields.get("counters")
            if (
                letter.fields.get("run") != self.run
                or type(counters) is not dict
                or set(counters) != {"rounds", "outer_rounds"}
                or any(type(each) is not int or each < 0 for each in counters.values())
                or counters["rounds"] != number
            ):
                raise Damaged(name, "it is of another run or round")
            counted = letters.last_rounds(name, letter.fields.get("counted"))
            if self.shards > 1:
                seals = letters.seals_of(name, letter.fields.get("shards"))
                shard = self._anchor_shard(number, seals, most)
                if shard is None:
                    return None
                letter = shard
            tensors = letters.unpacked(name, letter.fields.get("table"), letter.body)
            with refusing(Path(name)):
                return counters, counted, made(tensors)
        except Damaged as error:
            self._refuse(name, error)
            return None

    def _anchor_shard(self, number: int, seals: Sequence[str], most: int) -> Letter | None:
        if len(seals) != self.shards:
            raise Damaged(_anchor(number), f"it has {len(seals)} shards, and not {self.shards}")
        path = f"{_shards(number)}/{_anchor_shard(self.shard, seals[self.shard])}"
        letter = self._read(path, letters.ANCHOR_SHARD, most)
        if letter is not None and (
            letter.seal != seals[self.shard]
            or set(letter.fields) != {"run", "round", "shard", "table"}
            or [letter.fields[key] for key in ("run", "round", "shard")]
            != [self.run, number, self.shard]
        ):
            raise Damaged(path, "it is not the shard that its anchor names")
        return letter

    def forget(self) -> None:
        """Remove all but two anchors, and the rounds before those."""
        anchors = self.anchors()
        if len(anchors) < 2:
            return
        self.place.remove("", [_anchor(number) for number in anchors[:-2]])
        found = (_SHARDS.fullmatch(name) for name in self.place.names(""))
        for name in [match[0] for match in found if match and int(match[1]) < anchors[-2]]:
            self.place.remove(name, self.place.names(name))
        for number in self.rounds():
            if number < anchors[-2]:
                self.place.remove(_folder(number), self.place.names(_folder(number)))
        self._damaged.clear()
        self._told.clear()

    # Files.

    def _read(self, name: str, kind: int, most_body: int) -> Letter | None:
        most = letters.FIXED_BYTES + letters.MOST_FIELDS + most_body
        data = self.place.read(name, most)
        return None if data is None else letters.opened(name, data, kind, most_body, self.secret)

    def _write(self, name: str, kind: int, fields: Mapping[str, Any], body: bytes = b"") -> bool:
        data = letters.written(kind, fields, len(body), self.secret)
        letters.body_of(data)[:] = body
        letters.sealed(data, self.secret)
        return self.place.create(name, data)

    # Damaged files: read again, as they may be under way, and then refused for good.

    def _is_refused(self, path: str) -> bool:
        seen = self._damaged.get(path)
        if seen is None or seen.looks < _LOOKS:
            return False
        if time.monotonic() - seen.first < _BETWEEN_FIRST_AND_LAST:
            return False
        self._tell(path, seen.why)
        return True

    def _refuse(self, path: str, error: Damaged) -> bool:
        first, looks, _ = self._damaged.get(path, _Damage(time.monotonic(), 0, ""))
        if len(self._damaged) < _MOST_NAMES or path in self._damaged:
            self._damaged[path] = _Damage(first, looks + 1, str(error.args[1]))
        return self._is_refused(path)

    def _tell(self, path: str, why: str) -> None:
        if path not in self._told and len(self._told) < _MOST_NAMES:
            self._told.add(path)
            warn_here(f"mailbox {self.place.url}: {path} is refused: {why}")


def _folder(number: int) -> str:
    return f"round-{number:09d}"


def _anchor(number: int) -> str:
    return f"anchor-{number:09d}"


def _shards(number: int) -> str:
    """The folder of the shards of an anchor."""
    return f"shards-{number:09d}"


def _anchor_shard(shard: int, seal: str) -> str:
    return f"shard-{shard}-{seal[:16]}"


def _fill(data: bytearray, table: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the body of an anchor."""
    body = letters.body_of(data)
    body[: len(table)] = table
    letters.pack(tensors, body[len(table) :])


def _short(lines: list[str]) -> str:
    return f"'{lines[0][:200]}'" if lines else "nothing more"
